"""Pretrained weights as the beginning of implicit models: the first iteration is the pretrained model."""

import pytest
import torch
from pretrained_models import IDS, MODELS, close, llama, mamba2
from small_models import contractive_llama, contractive_mamba2, embedded

import deqseq as dq
from deqseq.integrations.pretrained import FROM_INPUT, from_pretrained_model
from deqseq.layers import with_weights

ONCE = dq.Stop.exactly(1)
EVERY_SWEEP = [dq.Simultaneous(), dq.Chunked(4), dq.Sequential(), dq.Sliding(1), dq.Sliding(5)]


@MODELS
@pytest.mark.parametrize("weight_norm", [True, False])
@torch.no_grad()
def test_the_first_self_iteration_is_the_pretrained_model(make, weight_norm):
    theirs = make()
    ours = from_pretrained_model(theirs, implicit=True, weight_norm=weight_norm).eval()
    assert ours.model.backbone.config.weight_norm == weight_norm
    assert with_weights(ours).model.backbone.injection.weight.abs().max() == 0
    expected = theirs(IDS).logits
    for sweep in EVERY_SWEEP[:-1]:
        output = ours(IDS, sweep=sweep, stop=ONCE)
        assert (output.stats.iterations == 1).all()
        close(output.logits, expected)
    # everything passes at its first evaluation: a window that is refilled takes the embedded tokens that come in
    for sweep in EVERY_SWEEP:
        output = ours(IDS, sweep=sweep, stop=dq.Stop(rtol=1e6, max_steps=4))
        assert (output.stats.iterations == 1).all()
        close(output.logits, expected)


@pytest.mark.parametrize("make", [llama, mamba2])
@torch.no_grad()
def test_padded_batches_and_generation_of_the_first_self_iteration(make):
    theirs = make()
    explicit, implicit = (from_pretrained_model(theirs, implicit=kind).eval() for kind in (False, True))
    mask = torch.arange(13) >= torch.tensor([0, 6, 2])[:, None]
    for sweep in EVERY_SWEEP[:-1]:
        output = implicit(IDS, mask=mask, sweep=sweep, stop=ONCE)
        close(output.logits[mask], explicit(IDS, mask=mask).logits[mask])
    options = {"max_new_tokens": 6, "mask": mask}
    tokens = implicit.generate(IDS, sweep=dq.Sequential(), stop=ONCE, **options).tokens
    assert torch.equal(tokens, explicit.generate(IDS, **options).tokens)


@pytest.mark.parametrize("make", [llama, mamba2])
def test_one_unrolled_self_iteration_has_the_pretrained_models_gradients(make):
    theirs = make()
    solve = dq.SolveConfig(stop=ONCE, gradient=dq.Unrolled(), start="input")
    explicit = from_pretrained_model(theirs, implicit=False)
    implicit = from_pretrained_model(theirs, implicit=True, solve=solve, weight_norm=False)
    losses = [model(IDS, labels=IDS).loss for model in (explicit, implicit)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in implicit.named_parameters()}
    for name, parameter in explicit.named_parameters():
        assert (gradients.pop(name) - parameter.grad).norm() < 1e-4 * parameter.grad.norm(), name
    assert gradients["model.backbone.injection.weight"].norm() > 1e-3
    assert gradients["model.backbone.injection.bias"].norm() > 1e-3


@pytest.mark.parametrize("weight_norm", [True, False])
@pytest.mark.parametrize("make", [llama, mamba2])
def test_the_injection_learns(make, weight_norm):
    """With everything else held, in the default setting: at most four iterations, then a phantom step."""
    lm = from_pretrained_model(make(), implicit=True, weight_norm=weight_norm)
    assert (lm.model.solve.stop, lm.model.solve.gradient) == (dq.Stop(rtol=0.05, max_steps=4), dq.Phantom(steps=1))
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_("injection" in name)
    optimizer = torch.optim.AdamW([p for p in lm.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        losses.append(lm(IDS, labels=IDS).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.2
    assert with_weights(lm).model.backbone.injection.weight.norm() > 0.1


@pytest.mark.parametrize("make", [llama, mamba2])
def test_the_whole_model_learns(make):
    torch.manual_seed(0)
    lm = from_pretrained_model(make(), implicit=True)
    before = {name: parameter.detach().clone() for name, parameter in lm.named_parameters()}
    optimizer = torch.optim.AdamW(lm.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        losses.append(lm(IDS, labels=IDS).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 1
    assert all(not torch.equal(before[name], parameter) for name, parameter in lm.named_parameters())


@pytest.mark.parametrize("make", [llama, mamba2])
@torch.no_grad()
def test_tokens_enter_by_the_start_alone_until_the_injection_is_trained(make):
    backbone = from_pretrained_model(make(), implicit=True).model.backbone
    z, one, other = (embedded(batch=1, dim=32).float() * scale for scale in (1, 2, -1))
    assert torch.equal(backbone(z, backbone.prepare(one))[0], backbone(z, backbone.prepare(other))[0])
    backbone.injection.parametrizations.weight.original0.fill_(1)
    assert (backbone(z, backbone.prepare(one))[0] - backbone(z, backbone.prepare(other))[0]).abs().max() > 0.1


@pytest.mark.parametrize("make", [contractive_llama, contractive_mamba2])
@pytest.mark.parametrize("sweep", EVERY_SWEEP, ids=str)
@torch.no_grad()
def test_where_a_solve_converges_its_start_does_not_matter(make, sweep):
    stop, mask = dq.Stop(rtol=1e-10, max_steps=500), torch.arange(7) < torch.tensor([[7], [4]])
    zero, start = (
        dq.ImplicitModel(make(), dq.SolveConfig(stop=stop, start=start)).eval() for start in ("zero", "input")
    )
    expected, got = (model(embedded(), mask=mask, sweep=sweep) for model in (zero, start))
    assert (expected.status == dq.Status.CONVERGED).all()
    assert (got.status == dq.Status.CONVERGED).all()
    assert (got.value - expected.value).abs().max() < 1e-8


@pytest.mark.parametrize("gradient", [dq.Phantom(2), dq.OneStep(), dq.Implicit()], ids=str)
def test_gradients_reach_the_input_whatever_the_start(gradient):
    stop, grads = dq.Stop(rtol=1e-11, max_steps=500), []
    for start in ("zero", "input"):
        model = dq.ImplicitModel(contractive_mamba2(), dq.SolveConfig(stop=stop, gradient=gradient, start=start))
        x, weights = embedded().requires_grad_(), torch.linspace(-1, 1, 8, dtype=torch.float64)
        (model(x).value * weights).sum().backward()
        grads.append(x.grad)
    assert grads[0].norm() > 0.1
    assert (grads[1] - grads[0]).norm() < 1e-6 * grads[0].norm()


@pytest.mark.parametrize("name", ["solve", "eval_solve"])
def test_a_start_at_zero_is_refused(name):
    with pytest.raises(ValueError, match=rf"^{name}\.start must be 'input'"):
        from_pretrained_model(llama(), implicit=True, **{name: dq.SolveConfig()})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"implicit": "no"}, TypeError, "^implicit must be True or False"),
        ({"implicit": True, "solve": {"start": "input"}}, TypeError, r"^solve must be .*start='input'"),
        ({"implicit": True, "eval_solve": {}}, TypeError, r"^eval_solve must be .*start='input'"),
        ({"implicit": True, "weight_norm": "no"}, TypeError, "^weight_norm must be True or False"),
        ({"implicit": False, "eval_solve": FROM_INPUT}, ValueError, "^leave out eval_solve, or give implicit=True"),
        ({"implicit": False, "solve": dq.SolveConfig()}, ValueError, "^leave out solve, or give implicit=True"),
        ({"implicit": False, "solve": FROM_INPUT, "weight_norm": True}, ValueError, "^leave out solve, weight_norm"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        from_pretrained_model(llama(), **arguments)


def test_the_default_solve_can_be_named():
    assert from_pretrained_model(llama(), implicit=True, solve=None).model.solve == FROM_INPUT
    assert isinstance(from_pretrained_model(llama(), implicit=False, weight_norm=False).model, dq.ExplicitModel)
