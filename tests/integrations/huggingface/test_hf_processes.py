"""Training in two processes: the Trainer and the core under DDP, and models sharded by FSDP2.

Everything is compared with one process on the same four rows a step. In float32 the two differ by the order in which
rows are summed, a few units in the last place of a loss (measured: 1e-6), which AdamW carries into weights (1e-5).
The solves stop at 1e-6, so a row that takes one iteration more or less changes nothing beyond that.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_runs import (
    NAMES,
    SHARDED,
    SHARED_OUT,
    Witness,
    by_hand,
    collate,
    losses,
    rows,
    small,
    trainer,
)
from transformers import AutoModelForCausalLM

from deqseq.integrations.huggingface import to_causal_lm

pytestmark = pytest.mark.slow
LOSS, WEIGHT = 5e-6, 5e-5
SCRIPTS = Path(__file__).parent
EACH = pytest.mark.parametrize("name", NAMES)


def torchrun(script: str, folder: Path) -> tuple[Path, list[dict]]:
    """Run a script in two processes; its folder, and what each process found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(SCRIPTS / script), str(folder)], capture_output=True, text=True, timeout=900, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [each["world size"] for each in found] == [2, 2]
    return folder, found


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    return torchrun("hf_ddp.py", tmp_path_factory.mktemp("ddp"))


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    return torchrun("hf_fsdp.py", tmp_path_factory.mktemp("fsdp"))


@functools.cache
def alone(name: str, folder: Path) -> tuple:
    """The Trainer's run in this process, and what its model was given."""
    model = small(name)
    witness = Witness(model)
    run = trainer(model, folder, max_steps=8, eval_dataset=rows(8, first=100))
    run.train()
    return run, witness, run.evaluate()["eval_loss"]


def close(got, wanted, tolerance: float) -> None:
    got, wanted = torch.as_tensor(got), torch.as_tensor(wanted)
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() < tolerance


def same_weights_nearly(got, wanted) -> None:
    for (name, mine), (other, theirs) in zip(got.named_parameters(), wanted.named_parameters(), strict=True):
        assert name == other
        close(mine.detach(), theirs.detach(), WEIGHT)


def mean(found: list[dict], *keys: str) -> list[float]:
    """The losses of whole batches, from those of the processes."""
    shares = [functools.reduce(dict.__getitem__, keys, each)["shares"] for each in found]
    return [sum(pair) / 2 for pair in zip(*shares, strict=True)]


class TestTrainerUnderDDP:
    @EACH
    @pytest.mark.parametrize("setting", SHARED_OUT)
    def test_a_step_of_two_processes_is_that_of_one(self, ddp, tmp_path, name, setting):
        folder, found = ddp
        run, _, evaluation = alone(name, folder / "alone" / name)
        for each in found:
            close(each[name][setting]["losses"], losses(run), LOSS)
            close(each[name][setting]["evaluation"], evaluation, LOSS)
        assert losses(run)[-1] < 0.75 * losses(run)[0]
        same_weights_nearly(AutoModelForCausalLM.from_pretrained(folder / f"{name}-{setting}"), run.model)

    @EACH
    @pytest.mark.parametrize("setting", SHARED_OUT)
    def test_each_process_sees_its_own_half(self, ddp, name, setting):
        folder, found = ddp
        _, witness, _ = alone(name, folder / "alone" / name)
        mine, theirs = (each[name][setting]["seen"] for each in found)
        assert len(mine) == len(theirs) == 16
        for step in range(8):
            halves = mine[2 * step : 2 * step + 2], theirs[2 * step : 2 * step + 2]
            assert sorted(halves[0] + halves[1]) == sorted(witness.seen[4 * step : 4 * step + 4])
        assert found[0][name][setting]["steps"] != found[1][name][setting]["steps"]

    @EACH
    @pytest.mark.parametrize("setting", SHARED_OUT)
    def test_resuming_is_bitwise_going_on(self, ddp, name, setting):
        for each in ddp[1]:
            assert each[name][setting]["resumed weights are the same"]
            assert each[name][setting]["losses when resumed"] == each[name][setting]["losses"]
            assert len(each[name][setting]["losses"]) == 8


class TestFSDP2:
    @EACH
    @pytest.mark.parametrize("kind", SHARDED)
    def test_training_is_that_of_one_process(self, fsdp, name, kind):
        folder, found = fsdp
        model = small(name, **SHARDED[kind]).train()
        close(mean(found, name, kind), by_hand(model, 4)[0], LOSS)
        assert [each[name][kind]["halves"] for each in found] == [True, True]
        same_weights_nearly(AutoModelForCausalLM.from_pretrained(folder / f"{name}-{kind}"), model)
        mine, theirs = (each[name][kind]["steps"] for each in found)
        assert (mine != theirs) == model.config.implicit  # processes need not take equally many iterations

    @EACH
    @pytest.mark.parametrize("kind", SHARDED)
    def test_the_gathered_weights_compute_what_the_sharded_model_did(self, fsdp, name, kind):
        folder, found = fsdp
        model = AutoModelForCausalLM.from_pretrained(folder / f"{name}-{kind}")
        for rank, each in enumerate(found):
            mine, prompts = (collate(rows(2, first=200 + 2 * rank), side) for side in ("right", "left"))
            with torch.no_grad():
                logits = model(mine["input_ids"], attention_mask=mine["attention_mask"]).logits
            close(each[name][kind]["logits"], logits, 1e-4)  # the solves stop at 1e-6 of the state
            del prompts["labels"]
            assert each[name][kind]["tokens"] == model.generate(**prompts, max_new_tokens=5, do_sample=False).tolist()

    def test_a_backward_pass_of_unequal_length_is_refused(self, fsdp):
        for each in fsdp[1]:
            for gradient in ("Implicit", "Unrolled"):
                assert each[gradient].startswith(f"{gradient} with Stop(rtol=")
                assert each[gradient].endswith("use Phantom, OneStep or Stop.exactly(n)")
            assert each["Unrolled exactly"] == ""


class TestCore:
    @EACH
    def test_ddp(self, ddp, name):
        close(mean(ddp[1], name, "core"), by_hand(to_causal_lm(small(name)).train(), 3)[0], LOSS)
        assert [each[name]["core"]["without gradient"] for each in ddp[1]] == [[], []]
        assert ddp[1][0][name]["core"]["steps"] != ddp[1][1][name]["core"]["steps"]

    @EACH
    def test_fsdp2(self, fsdp, name):
        close(mean(fsdp[1], name, "core"), by_hand(to_causal_lm(small(name)).train(), 3)[0], LOSS)
        assert [each[name]["core"]["halves"] for each in fsdp[1]] == [True, True]
