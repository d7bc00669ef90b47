"""A run of the examples' loop in one or two processes, whose checkpoints another number of processes goes on from.

    [torchrun --nproc_per_node 2] trained_in_processes.py FOLDER none|ddp|fsdp [bfloat16] UNTIL

Writes ``FOLDER/KIND-WORLD-UNTIL.json``: what each update was, and how the weights lay in the processes.
"""

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS.parent / "examples"), str(TESTS / "examples")]
loop, processes, small = map(importlib.import_module, ("common.loop", "common.processes", "small_runs"))


def main(folder: Path, kind: str, precision: str, until: int) -> None:
    accelerator = processes.make_accelerator(bfloat16=precision == "bfloat16", fsdp=kind == "fsdp")
    rank, world, lm, seen = accelerator.process_index, accelerator.num_processes, small.made(), set()
    assert world == (1 if kind == "none" else 2) == (dist.get_world_size() if dist.is_initialized() else 1)

    def call(model, batch, phase, step):
        sharded = all(
            isinstance(parameter, DTensor) and parameter.placements == (Shard(0),) for parameter in model.parameters()
        )
        seen.add("ddp" if isinstance(model, DistributedDataParallel) else "fsdp" if sharded else "none")
        return model(batch.inputs, targets=batch.targets)

    settings = loop.Settings(8, accumulate=2, clip=0.5, checkpoint_every=3)
    parts = (lm, *small.optimizer_of(lm), small.Words(8, rank, world), small.TWO, settings, folder / kind)
    updates = [asdict(update) for update in loop.train(accelerator, *parts, call=call, until=until)]
    lm.eval()
    with torch.no_grad():
        logits = lm(next(small.Words()).inputs).logits
    if rank == 0:
        found = {"updates": updates, "wrapped": sorted(seen), "logits": logits.flatten().tolist()}
        (folder / f"{kind}-{world}-{until}.json").write_text(json.dumps(found))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    folder, kind, precision, until = sys.argv[1:]
    main(Path(folder), kind, precision, int(until))
