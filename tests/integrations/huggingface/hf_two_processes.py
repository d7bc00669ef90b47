"""The Trainer under DDP, and models sharded by FSDP2; test_hf_processes.py runs this in two.

Arguments: ``ddp`` or ``fsdp``, and a folder, into which each process writes what it saw, and the
first one the trained models. A process that waits for ever ends after 200 seconds, and says where
it was.
"""

import faulthandler
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from hf_models import same_weights
from hf_runs import NAMES, Witness, by_hand, collate, losses, rows, small, trainer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

SHARED_OUT = {
    "plain": {"per_device_train_batch_size": 2},
    "accumulated": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
}
"""Two ways in which two processes take four rows a step."""
SHARDED = {
    "implicit": {},
    "weight norm": {"backbone": {"weight_norm": True}},
    "explicit": {"solve": None},
    "recomputing": {},
}
"""Fields of the models that are sharded."""


def trained(name, setting, folder):
    """Eight steps of the Trainer under DDP, the last four a second time from a checkpoint."""
    checkpoints = folder / "checkpoints" / f"{name}-{setting}"
    options = {
        "max_steps": 8,
        "per_device_eval_batch_size": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "ddp_find_unused_parameters": False,  # a parameter without a gradient is an error
        "eval_dataset": rows(8, first=100),
    }
    options |= SHARED_OUT[setting]
    model = small(name)
    witness = Witness(model)
    run = trainer(model, checkpoints, **options)
    run.train()
    assert isinstance(run.model_wrapped, DistributedDataParallel)
    run.save_model(str(folder / f"{name}-{setting}"))
    again = trainer(small(name), checkpoints, **options)
    again.train(resume_from_checkpoint=str(checkpoints / "checkpoint-4"))
    assert losses(again) == losses(run)
    assert same_weights(again.model, run.model)
    found = {"losses": losses(run), "evaluation": run.evaluate()["eval_loss"]}
    return found | {"seen": witness.seen, "steps": witness.steps}


def sharded(model):
    """The model with every block, and the rest, spread over two processes."""
    mesh = init_device_mesh("cpu", (2,))
    for block in model.model.core.backbone.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def spread(model):
    """Whether this process holds no more than half of the rows of each parameter."""
    return all(
        isinstance(parameter, DTensor)
        and parameter.placements == (Shard(0),)
        and 2 * len(parameter.to_local()) <= len(parameter) + 1
        for parameter in model.parameters()
    )


def sharded_training(name, kind, folder):
    """Four steps, the whole weights in a folder, and the sharded model's answers to new rows."""
    rank = dist.get_rank()
    model = small(name, **SHARDED[kind]).train()
    if kind == "recomputing":
        model.activation_checkpointing_enable()
    model = sharded(model)
    shares, steps = by_hand(model, 4, rank, 2)
    assert spread(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    if rank == 0:
        model.save_pretrained(folder / f"{name}-{kind}", state_dict=whole)
    model.eval()
    mine, prompts = (collate(rows(2, first=200 + 2 * rank), side) for side in ("right", "left"))
    with torch.no_grad():
        logits = model(mine["input_ids"], attention_mask=mine["attention_mask"]).logits
    del prompts["labels"]
    tokens = model.generate(**prompts, max_new_tokens=5, do_sample=False)
    return {"shares": shares, "steps": steps, "logits": logits.tolist(), "tokens": tokens.tolist()}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[2])
    ddp = sys.argv[1] == "ddp"
    check, kinds = (trained, SHARED_OUT) if ddp else (sharded_training, SHARDED)
    results = {name: {kind: check(name, kind, folder) for kind in kinds} for name in NAMES}
    results |= {"world size": dist.get_world_size()}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
