"""Implicit and explicit models, and the language model around them."""

import pytest
import torch
from small_models import affine, contractive_llama, contractive_mamba2, embedded
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import deqseq as dq

TIGHT = dq.Stop(rtol=1e-11, max_steps=500)


BACKBONES = pytest.mark.parametrize(
    "make", [contractive_mamba2, contractive_llama, affine], ids=["Mamba2", "Llama", "Affine"]
)
OTHER_SWEEPS = (dq.Chunked(3), dq.Sequential(), dq.Sliding(3), dq.Sliding(8))
SWEEPS = pytest.mark.parametrize("sweep", [dq.Simultaneous(), *OTHER_SWEEPS], ids=str)


@SWEEPS
def test_affine_model_finds_the_known_answer(sweep):
    backbone = affine()
    output = dq.ImplicitModel(backbone, stop=TIGHT)(embedded(), sweep=sweep)
    assert (output.status == dq.Status.CONVERGED).all()
    assert (output.value - backbone.solution(embedded())).abs().max() < 1e-9


@BACKBONES
@SWEEPS
def test_sweeps_agree(make, sweep):
    model = dq.ImplicitModel(make(), stop=TIGHT).eval()
    reference, output = model(embedded()), model(embedded(), sweep=sweep)
    assert (output.status == dq.Status.CONVERGED).all()
    assert (output.value - reference.value).abs().max() < 1e-9
    shape = (2,) if sweep == dq.Simultaneous() else (2, 7)
    assert output.stats.steps.shape == output.stats.residual.shape == shape
    assert output.stats.residual.max() <= 1e-11


@BACKBONES
@SWEEPS
def test_a_sequence_continued_from_its_cache_is_the_sequence(make, sweep):
    model, x = dq.ImplicitModel(make(), stop=TIGHT).eval(), embedded()
    first = model(x[:, :4], sweep=sweep, return_cache=True)
    second = model(x[:, 4:], sweep=sweep, cache=first.cache)
    whole = model(x).value
    assert (torch.cat([first.value, second.value], dim=1) - whole).abs().max() < 1e-9
    assert second.cache is None


@BACKBONES
@pytest.mark.parametrize(
    "gradient", [dq.Phantom(4, 0.8), dq.OneStep(), dq.Implicit(stop=TIGHT)], ids=lambda g: type(g).__name__
)
def test_training_with_any_sweep_gives_the_same_gradient(make, gradient):
    model = dq.ImplicitModel(make(), stop=TIGHT, gradient=gradient)
    gradients = []
    towards = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for sweep in (dq.Simultaneous(), *OTHER_SWEEPS):
        model.zero_grad()
        (model(embedded(), sweep=sweep).value * towards).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for first, *others in zip(*gradients, strict=True):
        assert first.abs().max() > 0
        assert all(torch.allclose(first, other, atol=1e-7) for other in others)


@pytest.mark.slow
def test_implicit_gradient_of_a_mamba2_block_by_finite_differences():
    backbone = contractive_mamba2(n_layers=1, d_model=4, d_state=2, weight_norm=False)
    stop = dq.Stop(rtol=1e-14, max_steps=500)
    model = dq.ImplicitModel(backbone, stop=stop, gradient=dq.Implicit(stop=stop))
    x = embedded(1, 3, 4).requires_grad_()
    names = ["layers.0.mixer.in_proj.weight", "layers.0.mixer.A_log", "norm_f.weight"]
    parameters = [dict(backbone.named_parameters())[name] for name in names]
    assert torch.autograd.gradcheck(lambda *_: model(x).value, (x, *parameters), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("gradient", [dq.Unrolled(checkpoint=True), dq.Phantom(3, checkpoint=True)], ids=str)
def test_checkpointing_under_weight_norm_gives_the_same_gradient(gradient):
    model = dq.ImplicitModel(contractive_mamba2(), stop=dq.Stop.exactly(6))
    gradients = []
    for checkpoint in (False, True):
        plain = dq.Unrolled() if isinstance(gradient, dq.Unrolled) else dq.Phantom(3)
        model.gradient = gradient if checkpoint else plain
        model.zero_grad()
        model(embedded()).value.square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        assert one.abs().max() > 0
        assert torch.allclose(one, two, rtol=1e-10)


def test_unrolled_with_another_sweep_is_an_error():
    model = dq.ImplicitModel(affine(), gradient=dq.Unrolled())
    with pytest.raises(ValueError, match=r"Unrolled differentiates the iteration itself and needs the Simultaneous"):
        model(embedded(), sweep=dq.Sequential())
    with torch.no_grad():
        assert model(embedded(), sweep=dq.Sequential()).value.shape == (2, 7, 8)


def test_trace_with_another_sweep_is_an_error():
    model = dq.ImplicitModel(affine()).eval().requires_grad_(False)
    with pytest.raises(ValueError, match=r"trace=True needs the Simultaneous sweep, got Chunked\(size=2\)"):
        model(embedded(), sweep=dq.Chunked(2), trace=True)
    assert model(embedded(), trace=True).stats.trace.shape[1:] == (2,)


def test_chunked_size_is_checked():
    with pytest.raises(ValueError, match=r"Chunked.size must be an integer >= 1, got 0"):
        dq.Chunked(0)


def test_eval_mode_takes_its_own_solver_and_stop_and_a_call_overrides_them():
    model = dq.ImplicitModel(affine(), stop=dq.Stop.exactly(3), eval_stop=dq.Stop.exactly(5), eval_solver=dq.Naive())
    assert model.train()(embedded()).stats.evaluations == 3
    assert model.eval()(embedded()).stats.evaluations == 5
    assert model(embedded(), stop=dq.Stop.exactly(2)).stats.evaluations == 2
    twice = model(embedded(), stop=dq.Stop.exactly(2), solver=dq.Relaxed(0.5)).value
    assert not torch.allclose(twice, model(embedded(), stop=dq.Stop.exactly(2)).value)


def test_eval_mode_gives_gradients_and_frozen_parameters_cost_none():
    model = dq.ImplicitModel(contractive_mamba2(), stop=TIGHT).eval()
    model(embedded()).value.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.requires_grad_(False)
    assert not model(embedded()).value.requires_grad
    x = embedded().requires_grad_()
    model(x).value.square().sum().backward()
    assert x.grad.abs().max() > 0


def test_dropout_has_a_fixed_point():
    model = dq.ImplicitModel(contractive_mamba2(dropout=0.3), stop=TIGHT).train()
    assert (model(embedded()).status == dq.Status.CONVERGED).all()


def test_bfloat16_autocast_trains_in_float32_states():
    model = dq.ImplicitModel(contractive_mamba2().float(), stop=dq.Stop.exactly(8))
    towards = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(1))  # the final norm fixes the size of z

    def gradients(autocast: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            value = model(embedded().float()).value
        (value * towards).sum().backward()
        return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    (half, half_gradients), (full, full_gradients) = gradients(True), gradients(False)
    assert half.dtype == torch.float32
    assert ((half - full).norm() / full.norm()).item() < 0.05
    for name, gradient in full_gradients.items():
        assert ((half_gradients[name] - gradient).norm() / gradient.norm()).item() < 0.1, name


def test_a_row_alone_is_the_row_in_its_batch():
    model, x = dq.ImplicitModel(contractive_mamba2(), stop=dq.Stop(rtol=1e-6)).eval(), embedded(4)
    together = model(x)
    for row in range(4):
        alone = model(x[row : row + 1])
        assert torch.allclose(alone.value[0], together.value[row], atol=1e-12)
        assert alone.stats.steps[0] == together.stats.steps[row]


def language_model(implicit=True):
    backbone = contractive_mamba2(injection=implicit)
    model = dq.ImplicitModel(backbone, stop=TIGHT) if implicit else dq.ExplicitModel(backbone)
    return dq.CausalLM(11, model).double()


IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.mark.parametrize("implicit", [True, False])
def test_labels_are_shifted_and_targets_are_not(implicit):
    lm = language_model(implicit)
    logits = lm(IDS).logits
    aligned = torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten())
    shifted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    assert lm(IDS, targets=IDS).loss.item() == pytest.approx(aligned.item(), rel=1e-9)
    assert lm(IDS, labels=IDS).loss.item() == pytest.approx(shifted.item(), rel=1e-9)
    assert lm(IDS).loss is None


def test_ignored_targets_do_not_count():
    lm, targets = language_model(), IDS.clone()
    targets[:, :3] = -100
    last = torch.nn.functional.cross_entropy(lm(IDS).logits[:, 3], IDS[:, 3])
    assert lm(IDS, targets=targets).loss.item() == pytest.approx(last.item(), rel=1e-9)


def test_head_is_the_embedding():
    lm = language_model()
    assert [name for name, _ in lm.named_parameters() if "embedding" in name] == ["embedding.weight"]
    lm.embedding.weight.data[3] = 0
    assert lm(IDS).logits[..., 3].abs().max() == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"labels": IDS, "targets": IDS}, ValueError, r"give labels .* or targets .*, not both"),
        ({"sweeep": dq.Sequential()}, TypeError, "unexpected keyword argument 'sweeep'"),
    ],
)
def test_bad_calls_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        language_model()(IDS, **arguments)


@pytest.mark.parametrize("ids", [torch.tensor([[11]]), torch.tensor([[3, -1]])])
def test_ids_outside_the_vocabulary_are_named(ids):
    with pytest.raises(ValueError, match=rf"input_ids must lie in 0\.\.10, got {ids.min()}\.\.{ids.max()}"):
        language_model()(ids)
    with pytest.raises(ValueError, match=r"targets must lie in 0\.\.10"):
        language_model()(torch.zeros_like(ids), targets=ids)


def test_targets_of_another_shape_are_named():
    forward = getattr(dq.CausalLM.forward, "__wrapped__", dq.CausalLM.forward)  # the tests' own check would be first
    with pytest.raises(ValueError, match=r"targets must have the shape of input_ids \(2, 4\), got \(2, 2\)"):
        forward(language_model(), IDS, targets=IDS[:, :2])


@pytest.mark.parametrize("answers", [{"labels": IDS[:, :1]}, {"targets": torch.full((2, 1), -100)}], ids=str)
def test_nothing_to_score_is_an_error(answers):
    with pytest.raises(ValueError, match="leave nothing to score"):
        language_model()(IDS[:, :1], **answers)


def test_embedded_tokens_are_dropped_once_and_in_training_alone():
    lm = dq.CausalLM(9, dq.ImplicitModel(affine(), stop=TIGHT), embedding_dropout=0.5).double()
    lm.train()
    torch.manual_seed(1)
    mine = lm(IDS).logits
    torch.manual_seed(1)
    dropped = nn.functional.dropout(lm.embedding(IDS), 0.5)
    assert torch.equal(mine, lm.logits(lm.model(dropped).value))
    assert (dropped == 0).any()
    lm.eval()
    assert torch.equal(lm(IDS).logits, lm.logits(lm.model(lm.embedding(IDS)).value))
    for p in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=r"embedding_dropout must lie in \[0, 1\), got"):
            dq.CausalLM(9, lm.model, embedding_dropout=p)


def test_an_explicit_model_drops_out():
    model = dq.ExplicitModel(contractive_mamba2(dropout=0.5, injection=False)).train()
    assert not torch.allclose(model(embedded()).value, model(embedded()).value)
    model.eval()
    assert torch.equal(model(embedded()).value, model(embedded()).value)


def test_a_cache_of_another_batch_or_model_is_named():
    model = dq.ImplicitModel(contractive_mamba2()).eval()
    cache = model(embedded(3), return_cache=True).cache
    with pytest.raises(ValueError, match=r"cache must be of 2 layers and 2 rows, .* got 2 layers and 3 rows"):
        model(embedded(2), cache=cache)
    with pytest.raises(ValueError, match=r"cache must be of 1 layers and 3 rows, .* got 2 layers and 3 rows"):
        dq.ImplicitModel(contractive_mamba2(n_layers=1)).eval()(embedded(3), cache=cache)
    with pytest.raises(TypeError, match="cache must be a Mamba2Cache, got AffineCache"):
        model.backbone._check_cache(affine().init_cache(3), embedded(3))
    with pytest.raises(ValueError, match=r"cache must have the 3 rows of its input and width 8, got \(2, 8\)"):
        dq.ImplicitModel(affine())(embedded(3), cache=affine().init_cache(2))


def test_training_on_nothing_but_diverged_rows_warns():
    model = dq.ImplicitModel(affine())
    model.backbone.U.data.fill_(torch.nan)
    with pytest.warns(dq.ConvergenceWarning, match=r"a solve to be differentiated failed for 2 of 2 rows"):
        model(embedded())


def test_an_explicit_model_takes_no_sweep():
    with pytest.raises(TypeError, match="unexpected keyword argument 'sweep'"):
        language_model(implicit=False)(IDS, sweep=dq.Sequential())


def test_empty_ids_are_named():
    with pytest.raises(ValueError, match=r"input_ids must be int64 of shape \(batch, length\), none of them 0, got"):
        language_model()(IDS[:0])


def test_a_cache_made_under_autocast_has_a_float32_state():
    model = dq.ImplicitModel(contractive_mamba2().float(), stop=dq.Stop.exactly(4)).eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        cache = model(embedded(length=3).float(), return_cache=True).cache
    assert [state.ssm.dtype for state in cache.layers] == [torch.float32] * 2


class WithConv(dq.Affine):
    def __init__(self) -> None:
        super().__init__(8)
        self.mix = weight_norm(nn.Conv1d(8, 8, 1, bias=False))
        self.mix.parametrizations.weight.original0.data *= 0.1

    def forward(self, z, injection, cache=None, *, return_trail=False):
        value, trail = super().forward(z, injection, cache, return_trail=return_trail)
        return value + self.mix(z.transpose(1, 2)).transpose(1, 2), trail


@SWEEPS
def test_any_parametrisation_gets_its_gradient_after_every_sweep(sweep):
    model = dq.ImplicitModel(WithConv().double())
    model(embedded(), sweep=sweep).value.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize("sweep", [dq.Chunked(7), dq.Chunked(50), dq.Sequential()], ids=str)
@pytest.mark.parametrize("length", [1, 7])
def test_statistics_are_per_token_whatever_the_length(sweep, length):
    output = dq.ImplicitModel(affine()).eval()(embedded(length=length), sweep=sweep)
    assert output.stats.steps.shape == output.stats.residual.shape == (2, length)


@SWEEPS
@pytest.mark.parametrize("return_cache", [False, True])
def test_evaluations_are_counted_over_all_chunks(sweep, return_cache):
    backbone, calls = affine(), []
    backbone.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        output = dq.ImplicitModel(backbone)(embedded(), sweep=sweep, return_cache=return_cache)
    assert output.stats.evaluations == len(calls)


@SWEEPS
def test_a_chunk_that_fails_makes_its_row_fail(sweep):
    x = embedded()
    x[1, 4] = torch.nan
    output = dq.ImplicitModel(affine()).eval()(x, sweep=sweep)
    assert output.status.tolist() == [dq.Status.CONVERGED, dq.Status.DIVERGED]


def test_a_cache_keeps_nothing_but_itself():
    model = dq.ImplicitModel(contractive_mamba2(), stop=dq.Stop.exactly(1)).eval()
    state = model(embedded(length=50), return_cache=True).cache.layers[0]
    for tensor in state:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    output = dq.ImplicitModel(affine()).eval()(embedded(), return_cache=True)
    before = output.cache.previous.clone()
    output.value.detach().zero_()
    assert torch.equal(output.cache.previous, before)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["labels", "targets"])
def test_what_concerns_padding_is_left_out_of_the_loss(side, kind):
    lm, counts = language_model(), (4, 2)
    mask = torch.arange(4) < torch.tensor(counts)[:, None]
    mask = mask.flip(1) if side == "left" else mask
    together = lm(IDS, mask=mask, **{kind: IDS}).loss
    total, scored = 0.0, 0
    for row, real in enumerate(mask):
        alone = IDS[row : row + 1, real]
        count = alone.shape[1] - (kind == "labels")
        total, scored = total + lm(alone, **{kind: alone}).loss * count, scored + count
    assert together.item() == pytest.approx((total / scored).item(), rel=1e-8)
