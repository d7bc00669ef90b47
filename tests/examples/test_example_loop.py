"""The training loop of the examples: what an update is, going on, branching off, stopping."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from common import loop
from common.checkpoints import newest
from common.loop import Settings
from common.processes import can_compile
from safetensors.torch import load_file
from small_runs import TWO, Words, losses, made, optimizer_of, run
from torch.nn import functional as F

import deqseq as dq
from deqseq.tasks import scaled_accuracy
from deqseq.training import Curriculum, NonFiniteLoss, bounded, free


def test_an_update_is_that_of_a_plain_loop(tmp_path):
    lm, words, wanted = made(implicit=False), Words(batch=8), []
    optimizer, scheduler = optimizer_of(lm)
    for _ in range(4):
        parts = [next(words), next(words)]
        loss = torch.stack(
            [F.cross_entropy(lm(b.inputs).logits.flatten(0, 1), b.targets.flatten()) for b in parts]
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.1)
        optimizer.step()
        wanted.append((loss.item(), norm.item(), scheduler.get_last_lr()[0]))
        scheduler.step()
    found = itertools.islice(run(tmp_path, made(implicit=False), words=Words(batch=8), accumulate=2, clip=0.1), 4)
    for update, (loss, norm, lr) in zip(found, wanted, strict=True):
        assert update.loss == pytest.approx(loss, rel=1e-5)
        assert update.gradient_norm == pytest.approx(norm, rel=1e-4)
        assert update.lr == pytest.approx(lr)
        assert (update.iterations, update.converged) == (None, None)


def test_accumulated_batches_are_one_big_batch(tmp_path):
    class Halves(Words):
        def __next__(self):
            self.rank, self.world = self.done % 2, 2
            whole = self.done // 2
            self.done, kept = whole, self.done
            batch = super().__next__()
            self.done = kept + 1
            return batch

    big = list(run(tmp_path / "big", words=Words(batch=8)))
    small = list(run(tmp_path / "small", words=Halves(batch=8), accumulate=2))
    for one, two in zip(big, small, strict=True):
        assert one.loss == pytest.approx(two.loss, rel=1e-4)
        assert one.gradient_norm == pytest.approx(two.gradient_norm, rel=1e-3)


def test_phases_follow_the_curriculum(tmp_path):
    updates = list(run(tmp_path))
    assert [update.phase for update in updates] == ["bounded"] * 4 + ["free"] * 4
    assert all((update.iterations, update.converged) == (2, 0) for update in updates[:4])
    assert all(2 < update.iterations <= 8 for update in updates[4:])
    assert [update.step for update in updates] == list(range(1, 9))
    for unit, until in (("steps", 3), ("tokens", 3 * 4 * 6)):
        curriculum = Curriculum((bounded(2, 1, until=until), free(8, 2)), unit=unit)
        phases = [update.phase for update in run(tmp_path / unit, curriculum=curriculum)]
        assert phases == ["bounded"] * 3 + ["free"] * 5


def test_an_interrupted_run_goes_on_to_the_bit(tmp_path):
    whole = losses(run(tmp_path / "whole", made(dropout=0.3)))
    parts: dict[int, float] = {}
    for stop in (3, 5, None):
        for update in run(tmp_path / "parts", made(dropout=0.3)):
            assert parts.setdefault(update.step, update.loss) == update.loss
            if update.step == stop:  # before this step's checkpoint, if it has one
                break
    assert list(parts.values()) == whole
    finished = made(dropout=0.3)
    assert list(run(tmp_path / "parts", finished)) == []
    assert finished.model.eval_solve == TWO.phases[-1].eval_solve
    weights = load_file(newest(tmp_path / "whole") / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in finished.state_dict().items() if name in weights)


def test_until_stops_with_a_checkpoint_and_the_run_ends_with_its_batches(tmp_path):
    whole = losses(run(tmp_path / "whole"))
    assert losses(run(tmp_path / "parts", until=5)) == whole[:5]
    assert newest(tmp_path / "parts").name == "checkpoint-00000005"
    assert losses(run(tmp_path / "parts")) == whole[5:]

    class Few(Words):
        def __next__(self):
            if self.done == 4:
                raise StopIteration
            return super().__next__()

    assert losses(run(tmp_path / "few", words=Few())) == whole[:4]
    assert newest(tmp_path / "few").name == "checkpoint-00000004"
    assert list(run(tmp_path / "few", words=Few())) == []


def test_a_long_run_is_compiled_and_goes_on_as_it_was(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(dq.CausalLM, "compile", lambda lm: compiled.append(lm))
    monkeypatch.setattr(loop, "can_compile", lambda device: True)
    monkeypatch.setattr(loop, "TRIED", 2)
    for choice, times in (("auto", 0), ("never", 0), ("always", 1)):
        list(run(tmp_path / choice, compile=choice))
        assert len(compiled) == times, choice
    monkeypatch.setattr(loop, "LONG", 0.0)
    monkeypatch.setattr(loop, "TRIED", 3)  # a checkpoint is written right after the decision
    lm, again = made(), made()
    for update in run(tmp_path / "long", lm, compile="auto"):
        assert compiled[1:] == [lm] * (update.step > 3)
        if update.step == 4:  # after a checkpoint
            break
    list(run(tmp_path / "long", again, compile="auto"))
    assert compiled[2:] == [again]


def test_without_a_compiler_runs_are_eager_or_say_so(tmp_path, monkeypatch):
    def broken(function):
        raise OSError("no g++")

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(loop, "TRIED", 2)
    monkeypatch.setattr(loop, "LONG", 0.0)
    can_compile.cache_clear()
    assert losses(run(tmp_path / "auto", compile="auto")) == losses(run(tmp_path / "never"))
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler here.* --compile never"):
        next(run(tmp_path / "always", compile="always"))
    monkeypatch.setattr(loop, "can_compile", lambda device: True)
    monkeypatch.setattr(dq.CausalLM, "compile", lambda lm: None)
    list(run(tmp_path / "elsewhere", compile="always", until=3))
    monkeypatch.setattr(loop, "can_compile", can_compile)
    with pytest.raises(SystemExit, match=r"--compile never"):
        next(run(tmp_path / "elsewhere", compile="auto"))
    assert losses(run(tmp_path / "elsewhere", compile="never")) == losses(run(tmp_path / "never again"))[3:]
    can_compile.cache_clear()


def test_another_curriculum_is_refused_and_may_branch_off(tmp_path):
    trunk = losses(run(tmp_path / "trunk", until=3))
    other = Curriculum((bounded(2, 1, until=None),))
    with pytest.raises(ValueError, match="curriculum"):
        list(run(tmp_path / "trunk", curriculum=other))
    branch = list(run(tmp_path / "branch", curriculum=other, origin=tmp_path / "trunk"))
    assert [(update.step, update.phase) for update in branch] == [(step, "bounded") for step in range(4, 9)]
    assert trunk + losses(branch[:1]) == losses(run(tmp_path / "whole"))[:4]  # both are still bounded
    with pytest.raises(FileNotFoundError, match=r"origin.*nowhere"):
        list(run(tmp_path / "none", origin=tmp_path / "nowhere"))


def test_a_curriculum_that_no_checkpoint_can_hold_is_refused_at_once(tmp_path):
    class Loop(dq.ExternalSolver):
        def run(self, f, z0, stop):
            raise AssertionError

    base = dq.SolveConfig(Loop())
    with pytest.raises(TypeError, match="a checkpoint cannot hold"):
        next(run(tmp_path, curriculum=Curriculum((bounded(2, 1, until=None, base=base),))))


@pytest.mark.filterwarnings("ignore::deqseq.solution.ConvergenceWarning")
def test_a_loss_that_is_not_finite_stops_the_run_before_the_weights_change(tmp_path):
    lm, before = made(), {}
    with pytest.raises(NonFiniteLoss, match=r"the loss is nan after step 4 in phase 'free'") as caught:
        for update in run(tmp_path, lm):
            if update.step == 4:
                lm.embedding.weight.data[:] = float("nan")
                before = {name: tensor.clone() for name, tensor in lm.state_dict().items()}
    assert "checkpoint-00000003" in caught.value.__notes__[0]
    for name, tensor in lm.state_dict().items():
        assert torch.equal(tensor.nan_to_num(7), before[name].nan_to_num(7))
    assert next(run(tmp_path)).step == 4


@pytest.mark.filterwarnings("ignore::deqseq.solution.ConvergenceWarning")
def test_solves_that_all_diverge_stop_the_run(tmp_path, monkeypatch):
    numbers = loop._numbers
    monkeypatch.setattr(
        loop, "_numbers", lambda output: numbers(replace(output, status=output.status * 0 + dq.Status.DIVERGED))
    )
    with pytest.raises(NonFiniteLoss, match="the residual of every row is inf after step 0 in phase"):
        next(run(tmp_path))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    def spoil(weight: torch.Tensor) -> None:
        weight.data.fill_(torch.inf)

    lm = made()
    with pytest.raises(NonFiniteLoss, match="norm of the weights"):
        for update in run(tmp_path, lm):
            if update.step == 2:  # the next update, whose checkpoint is due
                next(lm.parameters()).register_post_accumulate_grad_hook(spoil)
    assert not list(tmp_path.glob("*"))


def test_bfloat16_learns_with_float32_weights(tmp_path):
    lm = made()
    found = losses(run(tmp_path, lm, bfloat16=True, steps=30))
    assert sum(found[-5:]) < sum(found[:5])
    full = losses(run(tmp_path / "full", steps=30))
    assert found[:8] != full[:8]
    assert found[:8] == pytest.approx(full[:8], rel=0.05)
    assert {parameter.dtype for parameter in lm.parameters()} == {torch.float32}
    logits = lm.eval()(next(Words()).inputs).logits
    again = made()
    again.load_state_dict(lm.state_dict())
    TWO.at(1.0).apply(again)
    assert torch.equal(logits, again.eval()(next(Words()).inputs).logits)  # without autocast


class Single(torch.Tensor):
    """A tensor of a device without float64, as mps."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        found = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.Tensor.cpu:
            return found.as_subclass(torch.Tensor)
        assert not (isinstance(found, torch.Tensor) and found.dtype == torch.float64), "the device has no float64"
        return found


def test_the_numbers_of_an_update_need_no_float64_on_the_device():
    output = made()(next(Words()).inputs, targets=next(Words()).targets)
    single = replace(
        output,
        stats=replace(output.stats, iterations=output.stats.iterations.as_subclass(Single)),
        status=output.status.as_subclass(Single),
    )
    assert torch.equal(loop._numbers(single), loop._numbers(output))
    anywhere = SimpleNamespace(num_processes=1, device="meta")
    run = loop._Run(anywhere, *[None] * 6, call=None, share=None)
    assert run.mean(torch.tensor([0.1, 7.0], dtype=torch.float64)) == [0.1, 7.0]
    logits, targets = (part.as_subclass(Single) for part in (output.logits.detach(), next(Words()).targets))
    assert scaled_accuracy(logits, targets, 0.5) == scaled_accuracy(output.logits, next(Words()).targets, 0.5)


@pytest.mark.parametrize("change", [{"steps": 0}, {"accumulate": 0}, {"clip": 0.0}, {"clip": float("nan")}], ids=str)
def test_settings_that_make_no_sense(change):
    with pytest.raises(ValueError, match=f"Settings.{next(iter(change))} must be"):
        Settings(**{"steps": 1, **change})
