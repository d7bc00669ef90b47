"""The chunked scan against the plain recurrence in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import relative_error, ssd_recurrence

from deqseq.ops.reference import UNLIMITED, StepSizes, state_after
from deqseq.ops.ssd import ssd

GROUPS = pytest.mark.parametrize("groups", [1, 2])
STATES = pytest.mark.parametrize("given_state", [False, True])


def inputs(
    batch=2, length=13, heads=4, headdim=3, groups=2, d_state=5, dtype=torch.float64, seed=0
):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    A = -torch.rand(heads, generator=generator, dtype=torch.float64).add(0.1).to(dtype)
    arguments = [randn(batch, length, heads, headdim), randn(batch, length, heads), A]
    arguments += [randn(batch, length, groups, d_state) for _ in range(2)]
    extras = {"D": randn(heads), "dt_bias": randn(heads)}
    return arguments, extras, randn(batch, heads, headdim, d_state)


def state_alone(
    x, dt, A, B, state=None, dt_bias=None, dt_softplus=True, dt_limit=UNLIMITED, counts=None
):
    """The state after the scan, with the names of ``ssd``."""
    return state_after(x, dt, A, B, StepSizes(dt_bias, dt_softplus, dt_limit), state, counts)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 20),
    heads_per_group=st.integers(1, 3),
    groups=st.integers(1, 3),
    headdim=st.integers(1, 4),
    d_state=st.integers(1, 5),
    chunk_size=st.integers(1, 25),
    cut=st.integers(0, 19),
    limit=st.sampled_from([UNLIMITED, (0.2, 0.5)]),
    softplus=st.booleans(),
)
def test_any_shape_chunk_and_cut(
    batch, length, heads_per_group, groups, headdim, d_state, chunk_size, cut, limit, softplus
):
    heads = heads_per_group * groups
    arguments, extras, state = inputs(batch, length, heads, headdim, groups, d_state)
    y, h = ssd_recurrence(*arguments, **extras, state=state, dt_limit=limit, softplus=softplus)
    x, dt, A, B, C = arguments
    options = {**extras, "dt_limit": limit, "dt_softplus": softplus, "chunk_size": chunk_size}
    outputs = []
    carried = state
    before = state.clone()
    for piece in (slice(0, cut), slice(cut, length)):
        if x[:, piece].shape[1]:
            part = (x[:, piece], dt[:, piece], A, B[:, piece], C[:, piece])
            y_part, carried = ssd(*part, **options, initial_state=carried, return_state=True)
            outputs.append(y_part)
    assert relative_error(torch.cat(outputs, dim=1), y) < 1e-12
    assert relative_error(carried, h) < 1e-12
    assert torch.equal(state, before)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_lower_precision_and_autocast_accumulate_in_float32(dtype, bound, length, autocast):
    arguments, extras, state = inputs(length=length, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found, after = ssd(
            *arguments, **extras, initial_state=state.float(), return_state=True, chunk_size=16
        )
        alone = state_alone(*arguments[:4], state.float(), extras["dt_bias"])
    y, h = ssd_recurrence(*arguments, **extras, state=state)
    assert found.dtype == dtype
    assert after.dtype == torch.float32
    assert alone.dtype == torch.float32
    assert relative_error(found, y) < bound  # bfloat16: the rounding of the output alone
    assert max(relative_error(after, h), relative_error(alone, h)) < 1e-6


def scan_and_tensors(groups, given_state):
    """A scan of three chunks, the last of them cut short, as a function of all its tensors."""
    arguments, extras, state = inputs(
        batch=1, length=5, heads=2, headdim=2, groups=groups, d_state=2
    )
    tensors = [*arguments, extras["D"], extras["dt_bias"], *([state] if given_state else [])]

    def scan(x, dt, A, B, C, D, bias, initial=None):
        options = {"D": D, "dt_bias": bias, "initial_state": initial}
        return ssd(x, dt, A, B, C, **options, return_state=True, chunk_size=2)

    return scan, [t.requires_grad_() for t in tensors]


@GROUPS
@STATES
def test_first_and_second_derivatives_of_every_input(groups, given_state):
    scan, tensors = scan_and_tensors(groups, given_state)
    assert torch.autograd.gradcheck(scan, tensors)
    assert torch.autograd.gradgradcheck(scan, tensors, fast_mode=True)


@pytest.mark.parametrize("chunk_size", [16, 48, 256])
@pytest.mark.parametrize("strong", ["first", "here and there"])
@pytest.mark.parametrize("rate", [30.0, 160.0, 1e6])
def test_strong_decay_costs_no_digits(rate, strong, chunk_size):
    (x, _, A, B, C), extras, state = inputs(length=64, dtype=torch.float32)
    chance = torch.rand(2, 64, 4, generator=torch.Generator().manual_seed(1))
    decays = torch.arange(64)[:, None] < 32 if strong == "first" else chance < 0.3
    decays = decays & (torch.arange(4) < 3)  # the last head holds what it is given throughout
    dt = torch.where(decays, rate, 0.1 * chance) / -A
    tensors = [x, dt, A, B, C, extras["D"], state]
    weights = [torch.randn(t.shape, generator=torch.Generator().manual_seed(2)) for t in (x, state)]

    def values_and_gradients(scan, tensors):
        tensors = [t.clone().requires_grad_() for t in tensors]
        outputs = scan(*tensors)
        grads = [w.to(outputs[0].dtype) for w in weights]
        return [*outputs, *torch.autograd.grad(outputs, tensors, grads)]

    def ours(x, dt, A, B, C, D, state):
        alone = state_alone(x, dt, A, B, state, dt_softplus=False)
        options = {"dt_softplus": False, "return_state": True, "chunk_size": chunk_size}
        y, together = ssd(x, dt, A, B, C, D=D, initial_state=state, **options)
        assert relative_error(alone.detach(), together.detach()) < 1e-6
        return y, together

    def theirs(x, dt, A, B, C, D, state):
        return ssd_recurrence(x, dt, A, B, C, D, state=state, softplus=False)

    ours_all = values_and_gradients(ours, tensors)
    theirs_all = values_and_gradients(theirs, [t.double() for t in tensors])
    names = ["y", "state", "dx", "ddt", "dA", "dB", "dC", "dD", "dstate"]
    errors = dict(zip(names, map(relative_error, ours_all, theirs_all), strict=True))
    assert all(error < 1e-6 for error in errors.values()), errors  # float32 rounds by 6e-8


@pytest.mark.usefixtures("unchecked")
def test_bounds_and_sizes_that_do_not_fit_are_refused():
    (x, dt, A, B, C), _, _ = inputs()
    with pytest.raises(TypeError, match=r"x must be a floating-point tensor, got torch\.int64"):
        ssd(x.long(), dt, A, B, C)
    for call, message in (
        (lambda: ssd(x, dt, A, B, C, dt_limit=(2.0, 1.0)), r"dt_limit must be two ordered bounds"),
        (lambda: ssd(*inputs(length=0)[0]), "at least one token"),
        (lambda: ssd(*inputs(groups=3)[0]), "got 3 groups and 4 heads"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["dt", "A", "B", "C", "D", "dt_bias", "initial_state"])
def test_shapes_that_would_broadcast_are_refused(name):
    (x, dt, A, B, C), extras, state = inputs()
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "initial_state": state} | extras
    tensor = tensors[name]
    tensors[name] = tensor[:1] if tensor.ndim == 1 else tensor[:, :1]
    with pytest.raises(ValueError, match=f"{name} must have shape"):
        ssd(**tensors)


@GROUPS
@STATES
@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), (0.2, 0.5)])
def test_state_after_the_tokens_that_count(groups, given_state, dt_limit):
    counts = torch.tensor([13, 1, 0, 7])
    arguments, extras, state = inputs(batch=4, groups=groups)
    options = {"dt_bias": extras["dt_bias"], "dt_limit": dt_limit}
    together = state_alone(*arguments[:4], state if given_state else None, **options, counts=counts)
    start = state if given_state else torch.zeros_like(state)
    assert torch.equal(together[2], start[2])
    for row, count in enumerate(counts.tolist()):
        if count:
            one = slice(row, row + 1)
            x, dt, A, B, C = arguments
            cut = (x[one, :count], dt[one, :count], A, B[one, :count], C[one, :count])
            _, alone = ssd(*cut, **options, initial_state=start[one], return_state=True)
            assert relative_error(together[one], alone) < 1e-12
