"""The training step's benchmark at toy size: rows, counted evaluations, measured floors. No time is asserted."""

import copy
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
from small_models import contractive_llama, contractive_mamba2

import deqseq as dq
from deqseq.tasks import WordBatch, WordProblem, cyclic

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import equal_loss
import harness
import training_step
from sweeps import Trained
from training_sweeps import Arm

LENGTH, SWEEPS = 20, equal_loss.SWEEPS  # 20 is no multiple of the window
TASK = WordProblem(cyclic(2))


def tiny(make=contractive_mamba2, length=LENGTH) -> training_step.Work:
    torch.manual_seed(0)
    lm = dq.CausalLM(2, dq.ImplicitModel(make())).double()
    return training_step.Work(lm, TASK.fixed(2, length, seed=0))


class Counted:
    """Tokens of a row that a backbone evaluates, and those of them that a gradient comes back through."""

    def __init__(self, lm: dq.CausalLM) -> None:
        self.calls = self.tokens = self.backward = 0
        lm.model.backbone.register_forward_hook(self.note)

    def note(self, module, inputs, output) -> None:
        z = output[0]
        self.calls += 1
        self.tokens += z.shape[1]
        if z.requires_grad:
            z.register_hook(lambda gradient: self.add(gradient.shape[1]))

    def add(self, tokens) -> None:
        self.backward += tokens


@pytest.mark.parametrize("make", [contractive_mamba2, contractive_llama])
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
@pytest.mark.parametrize(("steps", "phantom"), [(4, 1), (24, 4)])
def test_a_step_of_fixed_length_evaluates_what_it_says(make, sweep, steps, phantom):
    work = tiny(make)
    counted = Counted(work.lm)
    output = work.step(training_step.bounded(sweep, steps, phantom))
    windows, width = (
        (1, LENGTH) if isinstance(sweep, dq.Simultaneous) else (3, 8)
    )  # the last one reaches beyond the end
    assert output.stats.updates.sum(dim=1).tolist() == [steps * windows * width] * 2
    assert counted.calls == steps * windows + phantom
    assert counted.tokens == steps * windows * width + phantom * LENGTH
    assert counted.backward == phantom * LENGTH
    assert all(p.grad is None for p in work.lm.parameters())


@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_a_converging_step_is_counted_in_token_updates(sweep):
    work = tiny()
    counted = Counted(work.lm)
    way = training_step.converging(sweep)
    (step,) = training_step.made("toy", {"eager": work}, way)
    assert step.converged == 1
    if isinstance(sweep, dq.Sliding):  # a window at the end of one row has empty places while others go on
        assert 1 <= counted.tokens / ((step.updates + 4) * LENGTH) < 1.1
        assert step.updates != step.stats.evaluations
    floor, by_hand, unrolled = step.peers
    assert floor.name == f"floor: {step.updates + 12:.4g} evaluations, eager"
    assert by_hand.name == f"by hand: {step.updates:.4g} + 4, eager"
    assert unrolled.name == f"unrolled: {round(step.updates) + 4}, eager"


@pytest.mark.parametrize("updates", [4.0, 3.25])
def test_peers_evaluate_what_their_names_say(updates):
    work = tiny()
    counted = [Counted(work.lm)]
    expected = [(updates + 6, 0), (updates + 2, 2), (round(updates) + 2, round(updates) + 2)]
    for peer, (evaluations, differentiated) in zip(work.peers(updates, 2), expected, strict=True):
        counted.append(Counted(work.lm))
        before = counted[0].tokens, counted[0].backward
        peer.run()
        assert counted[0].tokens - before[0] == evaluations * LENGTH, peer.name
        assert counted[0].backward - before[1] == differentiated * LENGTH, peer.name
        assert peer.differentiates == (differentiated > 0)


def test_by_hand_has_the_gradients_of_the_library():
    """From the fixed point on, undamped phantom steps are plain iterations."""
    work, found = tiny(), []

    def keep() -> None:
        found.append([p.grad.clone() for p in work.lm.parameters()])
        torch.nn.Module.zero_grad(work.lm)

    work.lm.zero_grad = keep
    work.by_hand(30, 30)
    way = training_step.Way("exact", dq.Simultaneous(), dq.Stop(rtol=1e-12, max_steps=200), 40, fixed=False)
    work.step(way)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)
    assert max(part.abs().max() for part in found[0]) > 1e-3


def test_rows_hold_measured_numbers():
    eager = tiny(contractive_llama, length=9)
    works = {"eager": eager, "compiled": training_step.Work(copy.deepcopy(eager.lm), eager.batch)}
    ways = [training_step.bounded(dq.Simultaneous()), training_step.converging(dq.Sliding())]
    rows = training_step.measure("toy", works, ways, turns=2)
    names = {field.name for field in fields(harness.Row)}
    assert all(json.loads(json.dumps(asdict(row))).keys() == names for row in rows)
    cases = {row.case for row in rows}
    assert cases == {f"toy, {way}, {kind}" for way in ways for kind in works}
    for case in cases:
        mine = [row for row in rows if row.case == case]
        timed = [row for row in mine if row.metric == "ms"]
        assert [row.peer.split(":")[0] for row in timed] == ["floor", "by hand", "unrolled"]
        assert [row.peer for row in mine if row.metric == "peak MiB"] == [row.peer for row in timed[1:]]
        assert all(row.ours > 0 and row.theirs > 0 and row.ratio > 0 for row in timed)
        assert len({row.theirs for row in timed}) == 3, "every peer is timed by itself"
        assert ("s, first call" in {row.metric for row in mine}) == case.endswith("compiled")
        assert ("converged" in {row.metric for row in mine}) == ("free" in case)


def test_memory_of_a_step_is_that_of_its_phantom_steps():
    work, way = tiny(contractive_llama), training_step.bounded(dq.Simultaneous(), 14, 1)
    rows = training_step.measure("toy", {"eager": work}, [way], turns=2)
    by_hand, unrolled = (row for row in rows if row.metric == "peak MiB")
    assert by_hand.ratio < 1.5
    assert unrolled.ratio < 0.3, "14 of 15 evaluations keep nothing"


def arms() -> list[Arm]:
    made = []
    for sweep in SWEEPS:
        lm = tiny().lm
        lm.model.solve = dq.SolveConfig(stop=dq.Stop(rtol=0.03, max_steps=32))
        optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2)
        made.append(Arm(sweep, 32, Trained("parity", lm, TASK), optimizer))
    return made


def test_training_on_is_compared_from_the_same_weights(monkeypatch):
    for name in ("LENGTH", "BATCH"):
        monkeypatch.setattr(f"equal_loss.{name}", 8)
        monkeypatch.setattr(f"training_sweeps.{name}", 8)
    both = arms()
    before = equal_loss.held_out(both[0], dq.Simultaneous())
    rows = list(equal_loss.equal_loss("toy", both, 3))
    assert all(len(one.seconds) == 3 for one in both)
    assert not any(one.model.lm._forward_hooks for one in both)
    losses = [row for row in rows if row.metric.startswith("nats")]
    assert len(losses) == 6
    assert all(row.theirs == before for row in losses[::2])
    for first, second in zip(losses[::2], losses[1::2], strict=True):
        assert (first.peer, second.peer) == ("before", str(both[0]))
        assert second.theirs == first.ours
        held_out = second.metric != equal_loss.WHILE_TRAINING
        assert second.goal == (f"ours <= {first.ours + equal_loss.SLACK:.5f}" if held_out else None)
        assert second.ours == pytest.approx(first.ours, abs=0.05)
        assert second.ours != first.ours, "the arms are trained and solved apart"
    (timed,) = [row for row in rows if row.goal == "ratio <= 0.5"]
    assert timed.case.endswith("Sliding(window=8), at most 32")


def test_shaken_copies_are_the_same_and_other_than_before():
    first, second = (equal_loss.shaken(one, 0.4) for one in arms())
    pairs = zip(first.model.lm.parameters(), second.model.lm.parameters(), arms()[0].model.lm.parameters(), strict=True)
    for mine, theirs, before in pairs:
        torch.testing.assert_close(mine, theirs)
        assert before.numel() == 1 or before.std(correction=0) == 0 or not torch.equal(mine, before)


def test_random_batches_are_of_the_vocabulary():
    batch = training_step.random_batch(2, 5)
    assert isinstance(batch, WordBatch)
    assert batch.inputs.shape == batch.targets.shape == (2, 5)
    assert set(batch.inputs.flatten().tolist()) <= set(range(training_step.VOCABULARY))
    assert not torch.equal(batch.inputs, batch.targets)
