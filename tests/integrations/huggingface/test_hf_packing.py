"""Sequences packed into one row are solved as rows of their own."""

import pytest
import torch
from hf_models import EVERY, EXPLICIT, IDS, close, made
from transformers import DataCollatorWithFlattening

import deqseq as dq
from deqseq.integrations.huggingface import ImplicitCache

LENGTHS = [[3, 4], [5, 2], [7]]
MASK = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 1, 1, 1, 0], [1] * 7]) > 0
"""Of a second packing: sequences of 3, of 2 and 3, and of 7 tokens."""


ROWS = [part for row, lengths in zip(IDS, LENGTHS, strict=True) for part in row.split(lengths)]
POSITIONS = {"position_ids": torch.cat([torch.arange(len(row)) for row in ROWS]).view(3, 7)}


def alone(model, rows, **options):
    """The output of each sequence as the only row."""
    return [model(row[None], **options) for row in rows]


def logits(outputs):
    """Of all tokens, one sequence after another."""
    return torch.cat([output.logits[0] for output in outputs])


@EVERY
@torch.no_grad()
def test_values_and_statistics_are_those_of_separate_rows(kind):
    model = made(kind)
    sweeps = [None] if kind in EXPLICIT else [dq.Simultaneous(), dq.Sliding(3)]
    for sweep in sweeps:
        solve = sweep and {"sweep": sweep}
        packed = model(IDS, solve=solve, **POSITIONS)
        parts = alone(model, ROWS, solve=solve)
        close(packed.logits.flatten(0, 1), logits(parts))
        assert packed.cache is None
        if sweep is not None:
            assert packed.converged.all()
            for name in ("iterations", "forced"):
                each = torch.cat([vars(part.stats)[name][0] for part in parts])
                assert torch.equal(vars(packed.stats)[name].flatten(), each)


@EVERY
def test_losses_and_gradients_are_those_of_separate_rows(kind):
    model = made(kind).train()
    count = {"num_items_in_batch": torch.tensor(16)}
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    packed = model(**collate([{"input_ids": row.tolist()} for row in ROWS]), **count).loss
    alone = sum(model(row[None], labels=row[None], **count).loss for row in ROWS)
    weights = list(model.parameters())
    both = [[loss, *torch.autograd.grad(loss, weights)] for loss in (packed, alone)]
    for found, expected in zip(*both, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@torch.no_grad()
def test_padding_between_and_behind_sequences_is_left_out():
    model = made("parts")
    rows = (IDS[0, :3], IDS[1, :2], IDS[1, 3:6], IDS[2])
    positions = torch.tensor([[0, 1, 2, 0, 0, 0, 0], [0, 1, 0, 0, 1, 2, 9], [0, 1, 2, 3, 4, 5, 6]])
    call = {"attention_mask": MASK.long(), "position_ids": positions}
    packed = model(IDS, output_hidden_states=True, **call)
    close(packed.logits[MASK], logits(alone(model, rows)))
    assert (packed.hidden_states[-1][~MASK] == 0).all()
    assert (packed.stats.iterations[~MASK] == 0).all()


@torch.no_grad()
def test_a_row_has_the_worst_status_of_its_sequences():
    model = made("mamba2")
    output = model(IDS, solve={"stop": {"max_steps": 2}}, **POSITIONS)
    assert output.status.tolist() == [dq.Status.MAX_STEPS_REACHED] * 3
    with pytest.raises(ValueError, match=r"explain\(\) needs the outcome of a whole solve"):
        output.explain()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 3, 21])}, "position_ids must be given too"),
        ({"seq_idx": torch.zeros(3, 7)}, "position_ids must be given too"),
        (POSITIONS | {"cu_seq_lens_q": torch.tensor([0, 4, 21])}, "cu_seq_lens_q must say"),
        (POSITIONS | {"cu_seq_lens_k": torch.tensor([0, 4, 21])}, "cu_seq_lens_k must say"),
        (
            POSITIONS | {"seq_idx": torch.zeros(3, 7)},
            "seq_idx must say .* where position_ids are 0",
        ),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 3, 4]])}, "must count .* packed sequence"),
        (POSITIONS | {"cache": ImplicitCache()}, "cache must be left out where"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        made("mamba2")(IDS, **call)


def test_what_a_collator_tells_of_packed_sequences_may_be_given():
    features = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collate(features, return_tensors="pt")
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert made("mamba2")(**batch).loss.isfinite()
