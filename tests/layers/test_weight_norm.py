"""Computed weights belong to the solve, the thread and the model that computed them, and cannot be written to."""

import copy
import pickle
import threading
from functools import partial
from typing import Any

import pytest
import torch
from small_models import contractive_mamba2
from torch import Tensor, nn

import deqseq as dq
from deqseq.layers import apply_weight_norm, cached_weights, fold_weight_norm

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def model(seed: int) -> dq.ImplicitModel:
    torch.manual_seed(seed)
    return dq.ImplicitModel(contractive_mamba2(), dq.SolveConfig(stop=dq.Stop(rtol=1e-6))).double().eval()


def scaled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: 0.9 * value for name, value in state.items()}


def layer() -> Any:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    apply_weight_norm(layer)
    return layer


@torch.no_grad()
def test_weights_loaded_into_another_model_during_a_solve_are_used():
    ours, other = model(0), model(1)
    state, seen = scaled(other.state_dict()), []

    def reload(_: dq.Progress) -> None:
        if not seen:
            other(X)
            other.load_state_dict(state)
            seen.append(other(X).value)

    ours(X, callback=reload)
    expected = model(1)
    expected.load_state_dict(state)
    assert torch.equal(seen[0], expected(X).value)


@torch.no_grad()
def test_weights_loaded_into_the_model_itself_during_a_solve_are_used_by_the_next_call():
    ours = model(0)
    state, seen = scaled(ours.state_dict()), []

    def reload(_: dq.Progress) -> None:
        if not seen:
            seen.append(None)
            ours.load_state_dict(state)
            seen.append(ours(X).value)

    ours(X, callback=reload)
    assert torch.equal(seen[1], ours(X).value)


def test_another_model_trains_while_a_thread_solves():
    """A thread stays inside a call of one model while the other is trained here."""
    ours, other = model(0), model(1).train()
    inside, done = threading.Event(), threading.Event()

    def wait(_: dq.Progress) -> None:
        inside.set()
        assert done.wait(60)

    def solve() -> None:
        with torch.no_grad():
            ours(X, callback=wait)

    thread = threading.Thread(target=solve)
    thread.start()
    assert inside.wait(60)
    try:
        values = []
        for _ in range(2):
            output = other(X)
            values.append(output.value.detach())
            output.value.sum().backward()
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter -= 1e-2 * parameter.grad
        assert not torch.equal(*values)
    finally:
        done.set()
        thread.join()


def test_the_same_model_trains_while_a_thread_solves():
    ours = model(0)
    with torch.no_grad(), cached_weights(ours.backbone):
        failures = []

        def train() -> None:
            with torch.enable_grad():
                ours(X).value.sum().backward()
            failures.extend(name for name, p in ours.backbone.layers.named_parameters() if p.grad is None)

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.data.copy_(torch.zeros(2, 3)),
        lambda weight: weight.mul_(2),
        lambda weight: nn.init.zeros_(weight),
        lambda weight: weight.__setitem__(0, 0.0),
        lambda weight: weight.data.add_(1),
    ],
)
def test_a_write_that_would_be_lost_is_an_error(write):
    with torch.no_grad(), pytest.raises(RuntimeError, match="fold_weight_norm"):
        write(layer().weight)


def test_merging_into_the_weight_as_adapters_do_is_an_error():
    one = layer()
    with pytest.raises(RuntimeError, match="fold_weight_norm"):
        one.weight.data += torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="fold_weight_norm"):
        one.weight.data = torch.ones(2, 3)


def test_a_weight_that_is_read_is_an_ordinary_tensor():
    one, x = layer(), torch.ones(4, 3)
    out = one(x)
    assert type(out) is Tensor and type(one.weight + 1) is Tensor
    out.sum().backward()
    assert one.parametrizations.weight.original1.grad is not None
    one.weight = torch.ones(2, 3)  # an assignment goes through to the parameters
    assert torch.allclose(one.weight, torch.ones(2, 3))


def test_folding_changes_no_bit_and_leaves_copies_alone():
    ours = model(0)
    other, before = copy.deepcopy(ours), ours(X).value.detach()
    fold_weight_norm(ours)
    assert not any("parametrizations" in name for name in ours.state_dict())
    assert torch.equal(ours(X).value, before) and torch.equal(other(X).value, before)
    assert all(p.requires_grad for p in ours.parameters())
    part: Any = ours.backbone.layers[0]
    part.mixer.in_proj.weight.data += 1  # a parameter again
    assert not torch.equal(ours(X).value, before)


def test_a_row_of_zeros_stays_zero_and_can_grow():
    part = nn.Linear(4, 3)
    with torch.no_grad():
        part.weight[1] = 0
    before = part.weight.clone()
    apply_weight_norm(part)
    torch.testing.assert_close(part.weight.as_subclass(Tensor), before)
    (2 - part(torch.ones(2, 4))).square().sum().backward()
    magnitude: Any = part.parametrizations.weight.original0
    assert magnitude.grad[1] != 0


def test_tied_weights_are_refused():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    with pytest.raises(ValueError, match=r"tied weights, got 0\.weight and 1\.weight"):
        apply_weight_norm(nn.Sequential(first, second))
    assert [name for name, _ in first.named_parameters()] == ["weight", "bias"]


def test_another_parametrised_tensor_is_not_lost_by_folding():
    part: Any = nn.Linear(3, 3)
    apply_weight_norm(part)
    torch.nn.utils.parametrize.register_parametrization(part, "bias", nn.Identity())
    with pytest.raises(ValueError, match="no parametrised tensor but weights, got 'bias'"):
        fold_weight_norm(part)
    assert part.bias.shape == (3,)


def test_frozen_weights_stay_frozen():
    one = layer()
    one.requires_grad_(False)
    fold_weight_norm(one)
    assert not one.weight.requires_grad


def test_what_torch_parametrises_is_computed_once_too():
    """Spectral norm takes a step of its power iteration at each use in training: recomputed, the map would change."""
    one: Any = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    with cached_weights(one):
        first = one.weight
        assert one.weight is first
    assert one.weight is not first and type(one.weight) is Tensor
    fold_weight_norm(one)
    assert "weight" in one.parametrizations, "only weight normalisation is folded"
    nn.utils.parametrize.remove_parametrizations(one, "weight")
    with cached_weights(one):
        assert isinstance(one.weight, nn.Parameter)


def test_a_folded_module_can_be_pickled():
    backbone = contractive_mamba2(weight_norm=True)
    fold_weight_norm(backbone)
    loaded = pickle.loads(pickle.dumps(backbone))
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), backbone.parameters(), strict=True))


def test_hooks_of_the_user_survive_folding():
    """They may be any callable, without a name."""
    layer = nn.Linear(2, 3)
    called = []
    layer.register_load_state_dict_pre_hook(partial(lambda *_: called.append(1)))
    apply_weight_norm(layer)
    fold_weight_norm(layer)
    layer.load_state_dict(layer.state_dict())
    assert called == [1]
