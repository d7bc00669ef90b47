"""``evaluate`` and ``commit``: a number of iterations without a solver, and the cache after some of
its tokens.
"""

import pytest
import torch
from small_models import (
    affine,
    contractive_llama,
    contractive_mamba2,
    embedded,
    injected_llama,
    recurrent_depth,
)

import deqseq as dq

# the docstrings' examples run with the checks of shapes
pytestmark = pytest.mark.usefixtures("unchecked")


def implicit(backbone):
    return dq.ImplicitModel(backbone, dq.SolveConfig(dq.Naive()))


MODELS = {
    "Affine": lambda: implicit(affine()),
    "Mamba2": lambda: implicit(contractive_mamba2()),
    "Llama": lambda: implicit(contractive_llama()),
    "RecurrentDepth": lambda: recurrent_depth(implicit(injected_llama()), dq.layers.RMSNorm(8)),
    "Looped": lambda: dq.ExplicitModel(dq.Looped(contractive_llama(injection=False), 2)),
}


@pytest.fixture(params=MODELS, scope="module")
def model(request):
    return MODELS[request.param]().eval()


@pytest.fixture
def past(model):
    """The cache after three tokens."""
    return model(embedded(2, 3), return_cache=True).cache


@pytest.mark.parametrize("iterations", [1, 4])
def test_it_is_the_forward_pass_with_so_many_iterations(model, past, iterations):
    x = embedded(2, 7)
    stop = {"stop": dq.Stop.exactly(iterations)}
    if isinstance(model, dq.ExplicitModel):
        stop = {}
    for cache in (None, past):
        evaluation = model.evaluate(x, cache=cache, iterations=iterations)
        expected = model(x, cache=cache, return_cache=True, **stop)
        assert torch.equal(evaluation.value, expected.value.detach())
        assert not evaluation.value.requires_grad
        committed = model.commit(cache, evaluation).tensors()
        for tensor, wanted in zip(committed, expected.cache.tensors(), strict=True):
            assert torch.equal(tensor, wanted)


def test_it_goes_on_from_its_states(model, past):
    if isinstance(model, dq.ExplicitModel):
        pytest.skip("nothing is iterated")
    x = embedded(2, 7)
    third = model.evaluate(x, cache=past, iterations=3)
    fifth = model.evaluate(x, cache=past, iterations=5)
    further = model.evaluate(x, cache=past, start=third.states, iterations=2)
    assert torch.equal(further.states, fifth.states)
    assert torch.equal(further.value, fifth.value)
    assert torch.equal(model.evaluate(x, cache=past, start=x).point, x)


@pytest.mark.parametrize("counts", [[3, 3], [2, 5], [0, 7]])
def test_each_row_commits_as_many_tokens_as_it_wants(model, past, counts):
    """The cache continues as that of the row's prefix. A later evaluation does not change what this
    one commits.
    """
    x = embedded(2, 7)
    rest = embedded(2, 2).flip(1)
    evaluation = model.evaluate(x, cache=past, iterations=3)
    model.evaluate(x.flip(1), cache=past)
    cache = model.commit(past, evaluation, torch.tensor(counts))
    after = model.evaluate(rest, cache=cache, iterations=3).value
    for row, count in enumerate(counts):
        index = torch.tensor([row])
        prefix = dq.take(past, index)
        if count:
            evaluation = model.evaluate(x[index, :count], cache=prefix, iterations=3)
            prefix = model.commit(prefix, evaluation)
        expected = model.evaluate(rest[index], cache=prefix, iterations=3).value
        torch.testing.assert_close(after[index], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "counts",
    [
        [0, 0],
        [1, 8],
        [-1, 2],
        [1],
        [[1, 2]],
        [1.0, 2.0],
        3,
        torch.zeros(2, dtype=torch.int64, device="meta"),
    ],
)
@pytest.mark.parametrize("name", ["Affine", "RecurrentDepth"])
def test_counts_that_cannot_be_committed_are_refused(name, counts):
    model = MODELS[name]()
    if isinstance(counts, list):
        counts = torch.tensor(counts)
    with pytest.raises((TypeError, ValueError), match="counts must be"):
        model.commit(None, model.evaluate(embedded()), counts)


def test_a_model_that_would_not_see_its_input_is_refused():
    model = implicit(contractive_llama(injection=False))
    x = embedded()
    with pytest.raises(ValueError, match="built without an injection"):
        model.evaluate(x)
    assert model.evaluate(x, start=x).states.shape == x.shape


@pytest.mark.parametrize("name", ["Affine", "RecurrentDepth"])
def test_an_evaluation_of_another_cache_or_model_is_not_committed(name):
    model, other = MODELS[name](), MODELS["RecurrentDepth" if name == "Affine" else "Affine"]()
    evaluation = model.evaluate(embedded())
    cache = model.commit(None, evaluation)
    words = r"evaluation must be what evaluate.. of this model returned for this cache"
    with pytest.raises(ValueError, match=words):
        model.commit(cache, evaluation)
    with pytest.raises(ValueError, match=words):
        model.commit(None, other.evaluate(embedded()))


def test_a_backbone_with_a_batch_norm_is_refused():
    backbone = affine()
    backbone.norm = torch.nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match=r"backbone must treat each row on its own.*BatchNorm1d"):
        dq.ImplicitModel(backbone)
