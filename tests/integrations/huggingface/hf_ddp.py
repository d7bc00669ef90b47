"""The Trainer, and models of the core, in two processes under DDP. Run by test_hf_processes.py with torchrun.

Argument: a folder, into which each process writes what it saw, and the first one the trained models.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from hf_runs import NAMES, SHARED_OUT, Witness, by_hand, in_two_processes, losses, rows, small, trainer
from torch.nn.parallel import DistributedDataParallel

from deqseq.integrations.huggingface import to_causal_lm


def train(name: str, setting: str, folder: Path) -> dict:
    """Eight steps, the last four of them a second time from a checkpoint."""
    checkpoints, kept = folder / "checkpoints" / f"{name}-{setting}", folder / f"{name}-{setting}"
    options = {
        **SHARED_OUT[setting],
        "max_steps": 8,
        "per_device_eval_batch_size": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "ddp_find_unused_parameters": False,  # a parameter without a gradient is then an error
        "eval_dataset": rows(8, first=100),
    }
    model = small(name)
    witness = Witness(model)
    run = trainer(model, checkpoints, **options)
    assert run.args.world_size == 2
    run.train()
    assert isinstance(run.model_wrapped, DistributedDataParallel)
    run.save_model(str(kept))
    again = trainer(small(name), checkpoints, **options)
    again.train(resume_from_checkpoint=str(checkpoints / "checkpoint-4"))
    pairs = zip(run.model.parameters(), again.model.parameters(), strict=True)
    return {
        "losses": losses(run),
        "evaluation": run.evaluate()["eval_loss"],
        "seen": witness.seen,
        "steps": witness.steps,
        "losses when resumed": losses(again),
        "resumed weights are the same": all(torch.equal(mine, theirs) for mine, theirs in pairs),
    }


def core(name: str) -> dict:
    """A CausalLM of the core."""
    lm = to_causal_lm(small(name)).train()
    shares, steps = by_hand(DistributedDataParallel(lm), 3, dist.get_rank(), 2)
    without = [parameter for parameter, value in lm.named_parameters() if value.grad is None]
    return {"shares": shares, "steps": steps, "without gradient": without}


def check(folder: Path) -> dict:
    found = {name: {setting: train(name, setting, folder) for setting in SHARED_OUT} for name in NAMES}
    return {name: {**settings, "core": core(name)} for name, settings in found.items()}


if __name__ == "__main__":
    in_two_processes(check)
