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

pytestmark = pytest.mark.usefixtures(
    "unchecked"
)  # the docstrings' examples run with the checks of shapes

NAIVE = dq.SolveConfig(dq.Naive())
MODELS = {
    "Affine": lambda: dq.ImplicitModel(affine(), NAIVE),
    "Mamba2": lambda: dq.ImplicitModel(contractive_mamba2(), NAIVE),
    "Llama": lambda: dq.ImplicitModel(contractive_llama(), NAIVE),
    "Looped": lambda: dq.ExplicitModel(dq.Looped(contractive_llama(injection=False), 2)),
    "RecurrentDepth": lambda: recurrent_depth(
        dq.ImplicitModel(injected_llama(), NAIVE), dq.layers.RMSNorm(8)
    ),
}


@pytest.fixture(params=MODELS, scope="module")
def model(request):
    return MODELS[request.param]().eval()


@pytest.fixture
def past(model):
    """Three tokens, and the cache after them."""
    return model(embedded(2, 3), return_cache=True).cache


def exactly(model, iterations):
    return {} if isinstance(model, dq.ExplicitModel) else {"stop": dq.Stop.exactly(iterations)}


def same(one: dq.Cache, other: dq.Cache) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.tensors(), other.tensors(), strict=True))


@pytest.mark.parametrize("iterations", [1, 4])
def test_it_is_the_forward_pass_with_so_many_iterations(model, past, iterations):
    x = embedded(2, 7)
    for cache in (None, past):
        found = model.evaluate(x, cache=cache, iterations=iterations)
        wanted = model(x, cache=cache, return_cache=True, **exactly(model, iterations))
        assert torch.equal(found.value, wanted.value.detach())
        assert not found.value.requires_grad
        assert same(model.commit(cache, found), wanted.cache)


def test_it_goes_on_from_its_states(model, past):
    if isinstance(model, dq.ExplicitModel):
        pytest.skip("nothing is iterated")
    x = embedded(2, 7)
    first, third, fifth = (model.evaluate(x, cache=past, iterations=n) for n in (1, 3, 5))
    on = model.evaluate(x, cache=past, start=third.states, iterations=2)
    assert torch.equal(on.states, fifth.states)
    assert torch.equal(on.value, fifth.value)
    assert torch.equal(model.evaluate(x, cache=past, start=first.states).point, first.states)


@pytest.mark.parametrize("counts", [[3, 3], [2, 5], [0, 7]], ids=str)
def test_each_row_commits_as_many_tokens_as_it_wants(model, past, counts):
    """The cache goes on as that of the row's prefix; an evaluation after the first does not change
    what it commits.
    """
    x, rest = embedded(2, 7), embedded(2, 2).flip(1)
    evaluation = model.evaluate(x, cache=past, iterations=3)
    model.evaluate(x.flip(1), cache=past)
    after = model.evaluate(
        rest, cache=model.commit(past, evaluation, torch.tensor(counts)), iterations=3
    )
    for row, count in enumerate(counts):
        index = torch.tensor([row])
        own = dq.take(past, index)
        if count:
            own = model.commit(own, model.evaluate(x[index, :count], cache=own, iterations=3))
        alone = model.evaluate(rest[index], cache=own, iterations=3)
        assert torch.allclose(after.value[row], alone.value[0], rtol=0, atol=1e-10)


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
    ids=str,
)
@pytest.mark.parametrize("name", ["Affine", "RecurrentDepth"])
def test_counts_that_cannot_be_committed_are_refused(name, counts):
    model = MODELS[name]()
    evaluation = model.evaluate(embedded())
    with pytest.raises((TypeError, ValueError), match="counts must be"):
        model.commit(None, evaluation, torch.tensor(counts) if isinstance(counts, list) else counts)


def test_a_model_that_would_not_see_its_input_is_refused():
    model, x = dq.ImplicitModel(contractive_llama(injection=False)), embedded()
    with pytest.raises(ValueError, match="built without an injection"):
        model.evaluate(x)
    assert model.evaluate(x, start=x).states.shape == x.shape
