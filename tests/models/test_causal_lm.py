"""Language models: what is scored, which calls are refused, and the same statistics as their
model's.
"""

import pytest
import torch
from small_models import affine, contractive_mamba2
from torch import nn

import deqseq as dq

TIGHT = dq.SolveConfig(stop=dq.Stop(rtol=1e-11, max_steps=500))
IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


def language_model(implicit=True):
    backbone = contractive_mamba2(injection=implicit)
    model = dq.ImplicitModel(backbone, TIGHT) if implicit else dq.ExplicitModel(backbone)
    return dq.CausalLM(11, model).double()


@pytest.mark.parametrize("implicit", [True, False])
def test_labels_are_shifted_and_targets_are_not(implicit):
    lm = language_model(implicit)
    logits = lm(IDS).logits
    aligned = nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten())
    shifted = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert lm(IDS, targets=IDS).loss.item() == pytest.approx(aligned.item(), rel=1e-9)
    assert lm(IDS, labels=IDS).loss.item() == pytest.approx(shifted.item(), rel=1e-9)
    assert lm(IDS).loss is None


def test_ignored_targets_do_not_count():
    lm, targets = language_model(), IDS.clone()
    targets[:, :3] = -100
    last = nn.functional.cross_entropy(lm(IDS).logits[:, 3], IDS[:, 3])
    assert lm(IDS, targets=targets).loss.item() == pytest.approx(last.item(), rel=1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["labels", "targets"])
def test_padding_is_left_out_of_the_loss(side, kind):
    lm = language_model()
    mask = torch.arange(4) < torch.tensor([4, 2])[:, None]
    mask = mask.flip(1) if side == "left" else mask
    together = lm(IDS, mask=mask, **{kind: IDS}).loss
    total, scored = 0.0, 0
    for row, real in enumerate(mask):
        alone = IDS[row : row + 1, real]
        count = alone.shape[1] - (kind == "labels")
        total, scored = total + lm(alone, **{kind: alone}).loss * count, scored + count
    assert together.item() == pytest.approx((total / scored).item(), rel=1e-8)


def test_head_is_the_embedding():
    lm = language_model()
    assert [name for name, _ in lm.named_parameters() if "embedding" in name] == [
        "embedding.weight"
    ]
    lm.embedding.weight.data[3] = 0
    assert lm(IDS).logits[..., 3].abs().max() == 0


def test_embedded_tokens_are_dropped_once_and_in_training_alone():
    lm = dq.CausalLM(9, dq.ImplicitModel(affine(), TIGHT), embedding_dropout=0.5).double()
    lm.train()
    torch.manual_seed(1)
    mine = lm(IDS).logits
    torch.manual_seed(1)
    dropped = nn.functional.dropout(lm.embedding(IDS), 0.5)
    assert torch.equal(mine, lm.logits(lm.model(dropped).value))
    assert (dropped == 0).any()
    lm.eval()
    assert torch.equal(lm(IDS).logits, lm.logits(lm.model(lm.embedding(IDS)).value))


def test_embedded_tokens_are_multiplied_by_the_rounded_scale():
    lm = dq.CausalLM(9, dq.ExplicitModel(dq.Affine(12)), embedding_scale=12**0.5)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = lm.to(dtype).embedding(IDS) * torch.tensor(12**0.5, dtype=dtype)
        assert torch.equal(lm.embed(IDS), x)
        assert torch.equal(lm(IDS).logits, lm.logits(lm.model(x).value))
    assert not torch.equal(x, (lm.embedding(IDS).double() * 12**0.5).bfloat16())


def test_logits_are_capped_as_in_gemma_2():
    lm, capped = (
        dq.CausalLM(9, dq.ExplicitModel(dq.Affine(8)), logit_softcap=cap).double()
        for cap in (None, 0.5)
    )
    capped.load_state_dict(lm.state_dict())
    states = 20 * torch.randn(2, 4, 8, dtype=torch.float64)
    torch.testing.assert_close(
        capped.logits(states), 0.5 * torch.tanh(lm.logits(states) / 0.5), rtol=1e-12, atol=0
    )
    assert capped.logits(states).abs().max() <= 0.5 < lm.logits(states).abs().max()


def test_fields_of_a_call_reach_the_solve_and_its_numbers_come_back():
    lm = language_model().eval()
    output = lm(IDS, sweep=dq.Sequential(), stop=dq.Stop(rtol=1e-11, max_steps=2))
    assert output.stats.iterations.tolist() == [[2] * 4] * 2
    assert not output.converged.any()
    assert lm(IDS, solve=dq.SolveConfig(stop=dq.Stop.exactly(2))).stats.evaluations == 2
    residuals = []
    assert lm(
        IDS, throw=True, callback=lambda now: residuals.append(now.residual)
    ).stats.evaluations == len(residuals)
    assert residuals[-1].max() <= 1e-11 < residuals[-2].max()


def test_an_explicit_model_solves_nothing():
    lm = language_model(implicit=False)
    output = lm(IDS)
    assert output.stats is None
    assert output.raise_if_failed() is output
    with pytest.raises(ValueError, match="converged needs a solve"):
        _ = output.converged
    for option in (
        {"sweep": dq.Sequential()},
        {"throw": True},
        {"solve": TIGHT},
        {"misspelt": None},
    ):
        with pytest.raises(TypeError, match=next(iter(option))):
            lm(IDS, **option)
    for option in ({"sweep": dq.Sequential()}, {"solve": TIGHT}):
        with pytest.raises(TypeError, match=next(iter(option))):
            lm.generate(IDS, max_new_tokens=2, **option)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"labels": IDS, "targets": IDS}, ValueError, "labels .* or targets .*, not both"),
        (
            {"input_ids": IDS[:, :1], "labels": IDS[:, :1]},
            ValueError,
            "labels leave nothing to score",
        ),
        ({"targets": torch.full_like(IDS, -100)}, ValueError, "targets leave nothing to score"),
        (
            {"input_ids": IDS.int()},
            TypeError,
            r"input_ids must be int64, got torch\.int32: write input_ids\.long\(\)",
        ),
    ],
    ids=lambda part: "-".join(part) if isinstance(part, dict) else "",
)
@pytest.mark.usefixtures("unchecked")
def test_bad_calls_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        language_model()(**{"input_ids": IDS} | arguments)


@pytest.mark.parametrize(
    "head",
    [nn.Linear(8, 9), nn.Linear(4, 11), nn.Linear(8, 11).half(), nn.Linear(8, 11), nn.Identity()],
    ids=str,
)
def test_a_head_that_does_not_fit_is_named(head):
    lm = dq.CausalLM(11, dq.ImplicitModel(dq.Affine(8)), tied=False)
    with pytest.raises(
        (TypeError, ValueError), match=r"head.* must (be a Tensor|have (no bias|the (shape|dtype)))"
    ):
        lm.head = head
        lm(torch.tensor([[1, 2, 3]]))
    with pytest.raises(TypeError, match=r"CausalLM\.embedding.* must be"):
        lm.embedding = head
