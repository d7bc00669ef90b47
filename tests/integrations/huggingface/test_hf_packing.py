"""Sequences packed into one row are solved as rows of their own."""

import pytest
import torch
from hf_models import EVERY, EXPLICIT, IDS, made
from transformers import DataCollatorWithFlattening

import deqseq as dq
from deqseq.integrations.huggingface import ImplicitCache

LENGTHS = ((3, 4), (5, 2), (7,))
MASK = torch.arange(7) < torch.tensor([3, 6, 7])[:, None]
"""Of a second packing: sequences of 3, of 2 and 4, and of 7 tokens."""


POSITIONS = {
    "position_ids": torch.tensor([[t for one in row for t in range(one)] for row in LENGTHS])
}


def alone(model, ids, lengths, **options):
    """The output of each sequence as the only row."""
    outputs = []
    for row, of in zip(ids, lengths, strict=True):
        outputs += [model(part[None], **options) for part in row[: sum(of)].split(list(of))]
    return outputs


@EVERY
@torch.no_grad()
def test_values_and_statistics_are_those_of_separate_rows(kind):
    model = made(kind)
    sweeps = (
        ({},)
        if kind in EXPLICIT
        else ({"solve": {"sweep": s}} for s in (dq.Simultaneous(), dq.Sliding(3)))
    )
    for options in sweeps:
        packed = model(IDS, **POSITIONS, **options)
        parts = alone(model, IDS, LENGTHS, **options)
        together = torch.cat([part.logits[0] for part in parts]).view(3, 7, -1)
        assert (packed.logits - together).abs().max() < 1e-12
        assert packed.cache is None
        if kind not in EXPLICIT:
            assert packed.converged.all()
            for name in ("iterations", "forced"):
                each = torch.cat([getattr(part.stats, name)[0] for part in parts]).view(3, 7)
                assert torch.equal(getattr(packed.stats, name), each)


@EVERY
def test_losses_and_gradients_are_those_of_separate_rows(kind):
    model, (batch,) = made(kind).train(), [LENGTHS]
    rows = [part for row, of in zip(IDS, batch, strict=True) for part in row.split(list(of))]
    collated = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(
        [{"input_ids": row.tolist()} for row in rows]
    )
    gradients = []
    for losses in (
        lambda: model(**collated, num_items_in_batch=torch.tensor(16)).loss,
        lambda: sum(
            model(row[None], labels=row[None], num_items_in_batch=torch.tensor(16)).loss
            for row in rows
        ),
    ):
        model.zero_grad()
        loss = losses()
        loss.backward()
        gradients.append([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@torch.no_grad()
def test_padding_between_and_behind_sequences_is_left_out():
    model, lengths = made("parts"), ((3,), (2, 4), (7,))
    positions = torch.tensor([[0, 1, 2, 0, 0, 0, 0], [0, 1, 0, 1, 2, 3, 9], [0, 1, 2, 3, 4, 5, 6]])
    packed = model(
        IDS, attention_mask=MASK.long(), output_hidden_states=True, position_ids=positions
    )
    parts = alone(model, IDS, lengths)
    assert (packed.logits[MASK] - torch.cat([part.logits[0] for part in parts])).abs().max() < 1e-12
    assert (packed.hidden_states[-1][~MASK] == 0).all()
    assert (packed.stats.iterations[~MASK] == 0).all()


@torch.no_grad()
def test_sequences_with_padding_before_each():
    model, mask = made("llama"), torch.tensor([[1, 1, 0, 1, 1, 1, 0]])
    packed = model(IDS[:1], attention_mask=mask, position_ids=torch.tensor([[0, 1, 0, 0, 1, 2, 0]]))
    parts = [model(IDS[:1, place]) for place in (slice(2), slice(3, 6))]
    assert (
        packed.logits[mask > 0] - torch.cat([part.logits[0] for part in parts])
    ).abs().max() < 1e-12


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
        (
            {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 3, 4]])},
            "position_ids must count .* packed sequence from 0",
        ),
        (
            {"position_ids": torch.tensor([[0, 1, 2, 4, 1, 3, 4]])},
            "position_ids must count the real tokens",
        ),
        (
            POSITIONS | {"cache": ImplicitCache()},
            "cache must be left out where sequences are packed",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        made("mamba2")(IDS, **call)
