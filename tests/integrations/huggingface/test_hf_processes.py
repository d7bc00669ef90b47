"""Training in two processes: the Trainer under DDP, and models sharded by FSDP2.

Everything is compared with one process on the same four rows a step. In float32 the two differ by
the order in which rows are summed, a few units in the last place of a loss (measured: 1e-6), which
AdamW carries into weights (1e-5). The solves stop at 1e-6, so a row that takes one iteration more
or less changes nothing beyond that.
"""

import json
import os
from functools import cache
from pathlib import Path

import pytest
import torch
from hf_models import close
from hf_runs import NAMES, Witness, by_hand, collate, losses, rows, small, trainer
from hf_two_processes import SHARDED, SHARED_OUT
from processes import output_of
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow
LOSS = 5e-6
WEIGHT = 5e-5
EACH = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """The folder of two processes, and what each found; run once for DDP and once for FSDP2."""

    @cache
    def run(kind):
        folder = tmp_path_factory.mktemp(kind)
        script = Path(__file__).with_name("hf_two_processes.py")
        run_two = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        output_of(*run_two, script, kind, folder, env=env, timeout=900)
        found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
        assert [each["world size"] for each in found] == [2, 2]
        return folder, found

    return run


def same_weights_nearly(found, expected):
    found = found.state_dict()
    expected = expected.state_dict()
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        close(weight, expected[name], WEIGHT)


@EACH
def test_a_step_of_two_processes_of_the_trainer_is_that_of_one(processes, tmp_path, name):
    folder, found = processes("ddp")
    model = small(name)
    witness = Witness(model)
    run = trainer(model, tmp_path, max_steps=8, eval_dataset=rows(8, first=100))
    run.train()
    evaluation = run.evaluate()["eval_loss"]
    assert losses(run)[-1] < 0.75 * losses(run)[0]
    for setting in SHARED_OUT:
        for each in found:
            close(each[name][setting]["losses"], losses(run), LOSS)
            close(each[name][setting]["evaluation"], evaluation, LOSS)
        saved = AutoModelForCausalLM.from_pretrained(folder / f"{name}-{setting}")
        same_weights_nearly(saved, model)
        mine, theirs = (each[name][setting]["seen"] for each in found)
        for step in range(8):  # each process sees its own half
            halves = mine[2 * step : 2 * step + 2], theirs[2 * step : 2 * step + 2]
            assert sorted(halves[0] + halves[1]) == sorted(witness.seen[4 * step : 4 * step + 4])
        assert found[0][name][setting]["steps"] != found[1][name][setting]["steps"]


@EACH
@pytest.mark.parametrize("kind", SHARDED)
def test_sharded_training_is_that_of_one_process(processes, name, kind):
    folder, found = processes("fsdp")
    model = small(name, **SHARDED[kind]).train()
    shares = torch.tensor([each[name][kind]["shares"] for each in found])
    close(shares.mean(dim=0), by_hand(model, 4)[0], LOSS)
    gathered = AutoModelForCausalLM.from_pretrained(folder / f"{name}-{kind}")
    same_weights_nearly(gathered, model)
    mine, theirs = (each[name][kind]["steps"] for each in found)
    # processes need not take equally many iterations
    assert (mine != theirs) == (model.config.solve is not None)
    for rank, each in enumerate(found):  # the gathered weights compute what the sharded model did
        right, left = (collate(rows(2, first=200 + 2 * rank), side) for side in ("right", "left"))
        with torch.no_grad():
            logits = gathered(right["input_ids"], attention_mask=right["attention_mask"]).logits
        close(each[name][kind]["logits"], logits, 1e-4)  # the solves stop at 1e-6 of the state
        del left["labels"]
        tokens = gathered.generate(**left, max_new_tokens=5, do_sample=False)
        assert each[name][kind]["tokens"] == tokens.tolist()
