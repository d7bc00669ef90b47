"""A class for every token, and models whose tokens see all others."""

import copy

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2, recurrent_depth
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

import deqseq as dq
from deqseq.as_json import from_json, to_json
from deqseq.layers import LlamaBlock
from deqseq.models.specification import parts_of
from deqseq.testing import BackboneContract

SOLVE = dq.SolveConfig(stop=dq.Stop(rtol=1e-10, max_steps=200))
CELLS = torch.cartesian_prod(torch.arange(2), torch.arange(3))


def both_ways(**changes):
    return dq.ImplicitModel(contractive_llama(causal=False, **changes), SOLVE)


def classifier(model=None, **options):
    torch.manual_seed(1)
    return dq.TokenClassifier(5, 3, model or both_ways(), **options).double().eval()


def ids(*shape, seed=0):
    return torch.randint(5, shape, generator=torch.Generator().manual_seed(seed))


def test_logits_are_the_head_of_the_fixed_point_of_tokens_and_positions():
    lm = classifier(positions=CELLS)
    tokens = ids(2, 6)
    output = lm(tokens, throw=True)
    rows, columns = lm.position_embedding.weight[:2], lm.position_embedding.weight[2:]
    x = lm.embedding.weight[tokens] + rows[CELLS[:, 0]] + columns[CELLS[:, 1]]
    z = output.states
    assert_close(lm.model.backbone(z, lm.model.backbone.prepare(x))[0], z, rtol=0, atol=1e-8)
    assert_close(output.logits, z @ lm.head.weight.T + lm.head.bias)
    assert output.logits.shape == (2, 6, 3)


def test_the_loss_leaves_out_padding_and_ignored_targets():
    lm, tokens, targets = classifier(), ids(2, 6), ids(2, 6, seed=1) % 3
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    targets[0, 1] = -100
    output = lm(tokens, targets=targets, mask=mask)
    scored = mask & (targets >= 0)
    expected = F.cross_entropy(output.logits[scored], targets[scored])
    assert_close(output.loss, expected)


@pytest.mark.parametrize("grid", [False, True])
def test_a_padded_row_is_the_row_alone(grid):
    lm, tokens = classifier(both_ways(grid=grid, headdim=4)), ids(4, 9)
    rows = ([1] * 9, [1, 1, 1, 1, 0, 0, 0, 0, 0], [0] * 8 + [1], [0, 1, 1, 0, 0, 1, 0, 1, 0])
    mask = torch.tensor(rows) > 0
    output = lm(tokens, mask=mask, throw=True)
    for ids_of_row, real, logits in zip(tokens, mask, output.logits, strict=True):
        alone = lm(ids_of_row[None, real], throw=True)
        assert_close(logits[real], alone.logits[0], rtol=1e-7, atol=1e-7)


def test_a_row_without_a_token_is_named():
    mask = torch.tensor([[True] * 5, [False] * 5])
    with pytest.raises(ValueError, match=r"mask must be True at a real token .* got none in row 1"):
        classifier()(ids(2, 5), mask=mask)


def test_every_token_sees_every_other():
    lm, tokens = classifier(), ids(1, 5)
    logits = lm(tokens).logits
    for place in range(5):
        other = tokens.clone()
        other[0, place] = (other[0, place] + 1) % 5
        changed = (lm(other).logits - logits).abs().amax(dim=2)[0]
        assert changed.min() > 1e-4


def test_a_grid_turns_halves_of_the_channels_by_line_and_column():
    backbone = contractive_llama(causal=False, grid=True, headdim=8, rope_theta=100.0)
    cos, _ = backbone.prepare(torch.zeros(1, 9, 8, dtype=torch.float64)).rotary
    line, column = torch.arange(9) // 3, torch.arange(9) % 3
    rates = torch.tensor([1.0, 0.1])
    angles = torch.cat([line[:, None] * rates, column[:, None] * rates], dim=1)
    assert_close(cos[0, :, 0], torch.cat([angles, angles], dim=1).cos().double())


def test_a_row_of_a_grid_must_fill_a_square():
    lm = classifier(both_ways(grid=True, headdim=4))
    with pytest.raises(
        ValueError, match=r"tokens of each row must fill a square.*got \[6\] tokens"
    ):
        lm(ids(2, 6))
    mask = torch.arange(9) < torch.tensor([[9], [3]])
    with pytest.raises(ValueError, match=r"must fill a square.*got \[9, 3\] tokens"):
        lm(ids(2, 9), mask=mask)
    with pytest.raises(ValueError, match=r"LlamaConfig\.grid must come with causal=False and a he"):
        dq.LlamaConfig(8, n_heads=1, grid=True)
    with pytest.raises(ValueError, match=r"4 divides, got causal=False, headdim 6"):
        dq.LlamaConfig(12, n_heads=2, causal=False, grid=True)


def test_what_needs_a_causal_model_is_refused_by_name():
    model, x = both_ways(), torch.randn(2, 4, 8, dtype=torch.float64)
    lm = classifier(model)
    layers = contractive_llama(causal=False, injection=False)
    injected = dq.Injected(layers, dq.AddInjection()).double()
    refused = (
        lambda: model(x, sweep=dq.Sliding(2)),
        lambda: model(x, sweep=dq.Sequential()),
        lambda: lm(ids(2, 4), sweep=dq.Chunked(2)),
        lambda: model(x, return_cache=True),
        lambda: model.evaluate(x),
        lambda: dq.ExplicitModel(model.backbone)(x, return_cache=True),
        lambda: dq.ExplicitModel(model.backbone).evaluate(x),
        lambda: dq.ImplicitModel(injected)(x, sweep=dq.Sliding(2)),
        lambda: dq.ImplicitModel(dq.Looped(model.backbone, 2))(x, sweep=dq.Sliding(2)),
    )
    for call in refused:
        with pytest.raises(NotImplementedError, match=r"this \w+ is not causal: all of its tokens"):
            call()
    given = dq.ImplicitModel(contractive_llama())(x, return_cache=True).cache
    with pytest.raises(NotImplementedError, match="not causal"):
        model(x, cache=given)
    with pytest.raises(ValueError, match=r"model must be causal.*TokenClassifier takes models"):
        dq.CausalLM(5, model)
    with pytest.raises(ValueError, match="model must be causal"):
        dq.CausalLM(5, recurrent_depth(model))


def test_explain_solves_a_model_that_is_not_causal_again():
    output = classifier()(ids(3, 6))
    assert "all 3 rows: converged" in str(output.explain())


@pytest.mark.parametrize("make", [contractive_llama, contractive_mamba2, None])
def test_causal_and_recurrent_depth_models_classify_too(make):
    model = recurrent_depth(both_ways()) if make is None else dq.ImplicitModel(make(), SOLVE)
    lm = classifier(model)
    output = lm(ids(2, 4), targets=ids(2, 4) % 3, throw=True)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in lm.parameters())
    assert lm.core is (model.core if make is None else model)


def test_a_specification_and_json_name_models_in_both_directions():
    config = dq.LlamaConfig(8, n_heads=2, causal=False, grid=True, norms="outer", injection=False)
    spec = dq.LanguageModelSpec(5, config, SOLVE, injection="add")
    model = spec.build_model()
    assert not model.causal
    assert parts_of(model)["backbone"] == from_json("backbone", to_json(config), "it")
    assert parts_of(model)["backbone"].grid
    with pytest.raises(ValueError, match="model must be causal"):
        spec.build()


def test_checkpointing_computes_blocks_again(monkeypatch):
    lm, calls = classifier().float().train(), []
    forward = LlamaBlock.forward

    def counted(*arguments):
        calls.append(1)
        return forward(*arguments)

    monkeypatch.setattr(LlamaBlock, "forward", counted)
    tokens, gradients, counts = ids(2, 6), [], []
    for checkpointed in (False, True):
        lm.model.backbone.gradient_checkpointing = checkpointed
        lm.zero_grad()
        calls.clear()
        options = {"stop": dq.Stop.exactly(8), "gradient": dq.Unrolled()}
        lm(tokens, targets=tokens % 3, **options).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in lm.parameters()])
        counts.append(len(calls))
    assert_close(*gradients)
    assert counts == [16, 32]


def test_weights_go_to_another_model_and_to_bfloat16(tmp_path):
    lm, tokens = classifier(positions=CELLS).float(), ids(2, 6)
    stop = dq.Stop.exactly(8)
    logits = lm(tokens, stop=stop).logits
    torch.save(lm.state_dict(), tmp_path / "weights.pt")
    other = classifier(positions=CELLS.flip(0)).float()
    assert not torch.allclose(other(tokens, stop=stop).logits, logits)
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(other(tokens, stop=stop).logits, logits)
    half = copy.deepcopy(lm).bfloat16()(tokens, stop=stop).logits
    assert half.dtype == torch.bfloat16
    assert_close(half.float(), logits, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_grids_are_counted_exactly(dtype):
    backbone = contractive_llama(causal=False, grid=True, headdim=4).to(dtype)
    assert backbone.prepare(torch.zeros(1, 361, 8, dtype=dtype)).rotary[0].shape[1] == 361
    with pytest.raises(ValueError, match=r"got \[399\] tokens"):
        backbone.prepare(torch.zeros(1, 399, 8, dtype=dtype))


def test_it_can_be_wrapped_by_distributed_data_parallel(tmp_path):
    lm, tokens = classifier(), ids(2, 6)
    lm(tokens, targets=tokens % 3).loss.backward()
    expected = [parameter.grad.clone() for parameter in lm.parameters()]
    lm.zero_grad()
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        DistributedDataParallel(lm)(tokens, targets=tokens % 3).loss.backward()
    finally:
        distributed.destroy_process_group()
    assert_close([parameter.grad for parameter in lm.parameters()], expected)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda lm: lm(ids(2, 5)), ValueError, "input_ids must have the length of positions, 6"),
        (
            lambda lm: lm(ids(2, 6), targets=ids(2, 6) + 1),
            ValueError,
            r"targets \(but for -100.*0..2",
        ),
        (lambda lm: lm(ids(2, 6), targets=ids(2, 6) * 0 - 100), ValueError, "nothing to score"),
        (lambda lm: lm(ids(2, 6), targets=ids(2, 4)), ValueError, "targets must"),
        (lambda lm: lm(ids(2, 6) + 1), ValueError, "input_ids must lie in 0..4"),
        (lambda lm: lm(ids(2, 6), cache=None), TypeError, "unknown argument 'cache'"),
        (lambda lm: setattr(lm, "solve", SOLVE), AttributeError, "would be read by nothing"),
        (lambda lm: classifier(positions=CELLS.float()), ValueError, "positions must be int64"),
        (lambda lm: classifier(positions=CELLS - 1), ValueError, "at least 0, got .* with -1"),
        (lambda lm: classifier(positions=CELLS[0]), ValueError, r"shape \(length, kinds\)"),
        (lambda lm: classifier(embedding_std=-1), ValueError, "embedding_std must"),
        (lambda lm: classifier(lm), TypeError, "model must be a Model"),
    ],
)
def test_bad_values_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call(classifier(positions=CELLS))


class Pair(dq.Backbone):
    """Two halves of a state, of which the second follows the mean of the first."""

    causal, state_width = False, 16

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.d_model, self.inner = 8, torch.nn.Linear(16, 16).double()

    def prepare(self, x, cache=None, mask=None):
        real = x.new_ones(x.shape[:2]) if mask is None else mask.to(x.dtype)
        return torch.cat([x, x.flip(2)], dim=2), real[..., None]

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        x, real = inputs
        mean = (z * real).sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True)
        return torch.tanh(self.inner(z + mean) / 4 + x), None


class TestPair(BackboneContract):
    backbone = Pair()


def test_a_state_may_be_wider_than_its_input():
    lm = classifier(dq.ImplicitModel(Pair(), SOLVE))
    tokens, given = ids(3, 5), torch.ones(3, 5, 16, dtype=torch.float64)
    found = lm(tokens, throw=True)
    assert found.states.shape == (3, 5, 16)
    assert_close(found.logits, lm.head(found.states[..., :8]))
    random = dq.RandomStart(1.0, seed=0)
    states = random.draw(given)
    once = {"stop": dq.Stop.exactly(1), "solver": dq.Naive()}
    for start, first in (("zero", 0 * given), (random, states), (given, given)):
        x = lm.embed(tokens)
        expected, _ = lm.model.backbone(first, lm.model.backbone.prepare(x))
        assert_close(lm(tokens, start=start, **once).states, expected)
        assert_close(lm(tokens, start=start, throw=True).states, found.states, rtol=0, atol=1e-8)


def test_starts_and_parts_that_do_not_fit_a_wide_state_are_named():
    lm, tokens = classifier(dq.ImplicitModel(Pair(), SOLVE)), ids(3, 5)
    for start, text in (
        (
            "input",
            r'start must not be "input" where the state is wider \(16\) than the input \(8\)',
        ),
        (torch.ones(3, 5, 8, dtype=torch.float64), r"start must be like the states.*\(3, 5, 16\)"),
    ):
        with pytest.raises(ValueError, match=text):
            lm(tokens, start=start)
    for make in (
        dq.ExplicitModel,
        lambda wide: dq.Looped(wide, 2),
        lambda wide: dq.Injected(wide, dq.AddInjection()),
        lambda wide: recurrent_depth(dq.ImplicitModel(wide)),
    ):
        with pytest.raises(ValueError, match="states as wide as its input, 8, got a Pair with st"):
            make(Pair())
    causal = Pair()
    causal.causal = True
    with pytest.raises(ValueError, match="model must have states as wide as its input"):
        dq.CausalLM(5, dq.ImplicitModel(causal))
    for name, value, error in (
        ("state_width", 4, ValueError),
        ("state_width", 16.0, TypeError),
        ("causal", "no", TypeError),
    ):
        wrong = Pair()
        setattr(wrong, name, value)
        with pytest.raises(error, match=rf"backbone\.{name} must be"):
            dq.ImplicitModel(wrong)


class Wrapped(dq.Backbone):
    """Someone's wrapper, which forgets that its layers are not causal."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner, self.d_model = inner, inner.d_model

    def prepare(self, x, cache=None, mask=None):
        return self.inner.prepare(x, cache, mask)

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        return self.inner(z, inputs, cache, need_aux=need_aux)


def test_a_wrapper_has_to_say_that_its_layers_are_not_causal():
    with pytest.raises(ValueError, match=r"backbone must say causal = False, as its part 'inner'"):
        dq.ImplicitModel(Wrapped(contractive_llama(causal=False)))
    lm = dq.CausalLM(5, dq.ImplicitModel(contractive_llama()))
    with pytest.raises(ValueError, match="model must be causal"):
        lm.model = both_ways()


def test_the_advice_for_a_failed_solve_names_no_sweep():
    lm = classifier()
    with pytest.raises(dq.ConvergenceError) as refused:
        lm(ids(2, 6), stop=dq.Stop(rtol=1e-12, max_steps=2), throw=True)
    assert "Sliding" not in str(refused.value)
    assert "max_steps" in str(refused.value)
