"""gather_once with sharded parts in one process; two processes are in test_hf_processes.py."""

import pickle

import pytest
import torch
import torch.distributed as dist
from small_models import contractive_mamba2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import deqseq as dq
from deqseq.training import gather_once

IDS = torch.tensor([[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]])


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def language_model(mesh, implicit=True):
    torch.manual_seed(0)
    backbone = contractive_mamba2(injection=implicit)
    core = dq.ImplicitModel(backbone) if implicit else dq.ExplicitModel(backbone)
    lm = dq.CausalLM(9, core).double()
    if mesh:
        for part in (*backbone.layers, lm):
            fully_shard(part, mesh=mesh)
    gather_once(lm)
    return lm


@pytest.fixture
def gathered(monkeypatch):
    """The parts that were gathered by hand, in order; resharded ones as None."""
    events = []
    unshard = FSDPModule.unshard
    reshard = FSDPModule.reshard
    monkeypatch.setattr(FSDPModule, "unshard", lambda self: (events.append(self), unshard(self))[1])
    monkeypatch.setattr(FSDPModule, "reshard", lambda self: (events.append(None), reshard(self))[1])
    return events


def test_weights_are_gathered_once_per_solve(mesh, gathered):
    lm = language_model(mesh)
    plain = language_model(None)
    gather_once(lm)  # does nothing
    output, wanted = (model(IDS, labels=IDS, stop=dq.Stop(rtol=1e-5)) for model in (lm, plain))
    assert output.stats.iterations.min() > 2
    blocks = list(lm.model.backbone.layers)
    assert gathered == [*blocks, *[None] * len(blocks)]
    torch.testing.assert_close(output.loss, wanted.loss)
    for loss in (output.loss, wanted.loss):
        loss.backward()
    for mine, theirs in zip(lm.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-6, atol=1e-9)


def test_they_are_sharded_again_after_an_error(mesh, gathered):
    with pytest.raises(dq.ConvergenceError):
        language_model(mesh)(IDS, stop=dq.Stop(rtol=1e-9, max_steps=2), throw=True)
    assert gathered.count(None) == len(gathered) - gathered.count(None) > 0


def test_an_explicit_model_gathers_for_a_cache_only(mesh, gathered):
    lm, plain = (language_model(one, implicit=False).eval() for one in (mesh, None))
    with torch.no_grad():
        lm(IDS)
        assert gathered == []
        cache, expected = (model(IDS, return_cache=True).cache for model in (lm, plain))
        assert gathered
    torch.testing.assert_close(cache.tensors(), expected.tensors())


def test_a_backward_pass_of_unequal_length_is_refused(mesh):
    lm = language_model(mesh)
    exactly = dq.Stop.exactly(3)
    for call in ({"gradient": dq.Implicit(stop=dq.Stop())}, {"gradient": dq.Unrolled()}):
        with pytest.raises(ValueError, match=r"use Phantom, OneStep or Stop\.exactly"):
            lm(IDS, **call)
        with torch.no_grad():
            lm(IDS, **call)
    lm(IDS, gradient=dq.Implicit(stop=exactly))
    solve = dq.SolveConfig(stop=exactly, gradient=dq.Unrolled())
    lm(IDS, solve=solve, start=torch.zeros_like(lm.embed(IDS)))


@pytest.mark.parametrize(
    "name", ["model.backbone", "model.backbone.backbone", "model.backbone.injection", "embedding"]
)
def test_parts_that_are_used_outside_of_their_forward_pass_are_refused(mesh, name):
    backbone = dq.Injected(contractive_mamba2(injection=False), dq.ConcatInjection(8))
    lm = dq.CausalLM(9, dq.ImplicitModel(backbone)).double()
    fully_shard(lm.get_submodule(name), mesh=mesh)
    with pytest.raises(ValueError, match=f"^{name} must not be sharded by itself.* the blocks"):
        gather_once(fully_shard(lm, mesh=mesh))


def test_a_head_that_is_not_tied_can_be_sharded(mesh):
    lm = dq.CausalLM(9, dq.ImplicitModel(contractive_mamba2()), tied=False).double()
    expected = lm(IDS).logits
    for part in (lm.embedding, lm.head, *lm.model.backbone.layers, lm):
        fully_shard(part, mesh=mesh)
    gather_once(lm)
    torch.testing.assert_close(lm(IDS).logits, expected)


def test_what_is_registered_can_be_pickled(mesh):
    model = dq.ImplicitModel(contractive_mamba2())
    fully_shard(model.backbone.layers[0], mesh=mesh)
    gather_once(model)
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        assert len(hooks) == 1
        assert pickle.loads(pickle.dumps(hooks)) == hooks
