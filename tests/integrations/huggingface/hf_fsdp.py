"""Models that ``fully_shard`` (FSDP2) spreads over two processes. Run by test_hf_processes.py with torchrun.

Argument: a folder, into which each process writes what it saw, and the first one the trained models.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from hf_runs import NAMES, SHARDED, by_hand, collate, in_two_processes, rows, small
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import deqseq as dq
from deqseq.integrations.huggingface import to_causal_lm
from deqseq.training import gather_once


def sharded(model, backbone):
    """The model with every block, and the rest, spread over two processes."""
    mesh = init_device_mesh("cpu", (2,))
    for block in backbone.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def spread(model) -> bool:
    """Whether this process holds no more than half of the rows of each parameter, and the mesh has two processes."""
    return all(
        isinstance(parameter, DTensor)
        and (parameter.placements, parameter.device_mesh.size()) == ((Shard(0),), 2)
        and 2 * len(parameter.to_local()) <= len(parameter) + 1
        for parameter in model.parameters()
    )


def train(name: str, kind: str, folder: Path) -> dict:
    """Four steps, the whole weights in a folder, and what the sharded model then makes of other rows than its peer."""
    rank, model = dist.get_rank(), small(name, **SHARDED[kind]).train()
    sharded(model, model.model.core.backbone)
    shares, steps = by_hand(model, 4, rank, 2)
    halves = spread(model)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(folder / f"{name}-{kind}", state_dict=whole)
    model.eval()
    mine, prompts = (collate(rows(2, first=200 + 2 * rank), side) for side in ("right", "left"))
    with torch.no_grad():
        logits = model(mine["input_ids"], attention_mask=mine["attention_mask"]).logits
    del prompts["labels"]
    tokens = model.generate(**prompts, max_new_tokens=5, do_sample=False)
    return {"shares": shares, "steps": steps, "halves": halves, "logits": logits.tolist(), "tokens": tokens.tolist()}


def core(name: str) -> dict:
    """A CausalLM of the core."""
    lm = to_causal_lm(small(name)).train()
    sharded(lm, lm.model.backbone)
    gather_once(lm)
    shares, steps = by_hand(lm, 3, dist.get_rank(), 2)
    return {"shares": shares, "steps": steps, "halves": spread(lm)}


def refused(name: str, gradient: dq.Gradient, stop: dq.Stop) -> str:
    """What is said of a gradient under which processes would wait for each other."""
    model = small(name, solve={"gradient": gradient, "stop": stop}).train()
    try:
        by_hand(sharded(model, model.model.core.backbone), 1, dist.get_rank(), 2)
    except ValueError as error:
        return str(error)
    return ""


def check(folder: Path) -> dict:
    found = {name: {kind: train(name, kind, folder) for kind in SHARDED} for name in NAMES}
    return {name: {**kinds, "core": core(name)} for name, kinds in found.items()} | {
        "Implicit": refused("mamba2", dq.Implicit(), dq.Stop.exactly(3)),
        "Unrolled": refused("mamba2", dq.Unrolled(), dq.Stop()),
        "Unrolled exactly": refused("mamba2", dq.Unrolled(), dq.Stop.exactly(3)),
    }


if __name__ == "__main__":
    in_two_processes(check)
