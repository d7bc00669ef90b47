"""The training loop: what an update is, going on, branching off, stopping."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import deqseq as dq
from deqseq.tasks.text import ByteEncoder, PackedText
from deqseq.tasks.text.batches import PackedBatches
from deqseq.training import Curriculum, NonFiniteLoss, bounded, free, parameter_groups, warmup_constant_decay
from deqseq.training.loop import Run, Settings, Update

TEXT = PackedText.pack(["to be or not to be, that is the question", "we are such stuff"], ByteEncoder(), length=6)
TWO = Curriculum((bounded(2, 1, until=0.5), free(8, 2)))


def model(implicit: bool = True, dropout: float = 0.0) -> dq.CausalLM:
    torch.manual_seed(0)
    config = dq.Mamba2Config(d_model=16, d_state=4, headdim=8, dropout=dropout, injection=implicit)
    inner = dq.ImplicitModel(dq.Mamba2(config)) if implicit else dq.ExplicitModel(dq.Mamba2(config))
    return dq.CausalLM(257, inner, embedding_dropout=dropout)


def run(folder: Path, lm: dq.CausalLM | None = None, curriculum: Curriculum = TWO, **changes) -> Run:
    lm = model() if lm is None else lm
    settings = Settings(**{"steps": 8, "checkpoint_every": 3, **changes})
    optimizer = torch.optim.AdamW(parameter_groups(lm), lr=3e-3)
    scheduler = warmup_constant_decay(optimizer, total_steps=8, warmup_steps=2, decay_steps=3)
    batches = PackedBatches(TEXT, batch_size=2, seed=5)
    return Run(lm, batches, optimizer, scheduler, curriculum, settings, folder)


def losses(updates) -> list[float]:
    return [update.loss for update in updates]


def test_an_update_is_that_of_a_plain_loop(tmp_path):
    lm = model(implicit=False)
    optimizer = torch.optim.AdamW(parameter_groups(lm), lr=3e-3)
    scheduler = warmup_constant_decay(optimizer, total_steps=8, warmup_steps=2, decay_steps=3)
    batches, wanted = PackedBatches(TEXT, batch_size=4, seed=5), []
    for _ in range(4):
        batch = next(batches)
        loss = F.cross_entropy(lm(batch.inputs).logits.flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.5)
        optimizer.step()
        wanted.append((loss.item(), norm.item(), scheduler.get_last_lr()[0]))
        scheduler.step()
    made = run(tmp_path, model(implicit=False), batches_a_step=2, clip=0.5)
    found = [next(iter(made)) for _ in range(4)]
    for update, (loss, norm, lr) in zip(found, wanted, strict=True):
        assert update.loss == pytest.approx(loss, rel=1e-5)
        assert update.gradient_norm == pytest.approx(norm, rel=1e-4)
        assert update.lr == pytest.approx(lr)
        assert (update.self_iterations, update.converged) == (None, None)
    assert made.tokens == 4 * 4 * 6


def test_phases_follow_the_curriculum(tmp_path):
    updates = list(run(tmp_path))
    assert [update.phase for update in updates] == ["bounded"] * 4 + ["free"] * 4
    assert all(update.self_iterations == 2 for update in updates[:4])
    assert all(update.converged == 0 for update in updates[:4])
    assert all(2 < update.self_iterations <= 8 for update in updates[4:])
    assert [update.step for update in updates] == list(range(1, 9))
    assert isinstance(updates[0], Update)


@pytest.mark.parametrize("stops", [(1,), (3, 5), (4, 7)], ids=str)
def test_an_interrupted_run_goes_on_to_the_bit(tmp_path, stops):
    whole = losses(run(tmp_path / "whole", model(dropout=0.3)))
    parts: dict[int, float] = {}
    for stop in (*stops, 8):
        for update in run(tmp_path / "parts", model(dropout=0.3)):
            assert parts.setdefault(update.step, update.loss) == update.loss
            if update.step == stop:
                break
    assert list(parts.values()) == whole
    finished = run(tmp_path / "parts")
    assert list(finished) == []
    assert finished.model.model.eval_stop == TWO.phases[-1].eval_stop


def test_curricula_in_steps_and_tokens(tmp_path):
    for unit, until in (("steps", 3), ("tokens", 3 * 2 * 6)):
        curriculum = Curriculum((bounded(2, 1, until=until), free(8, 2)), unit=unit)
        phases = [update.phase for update in run(tmp_path / unit, curriculum=curriculum)]
        assert phases == ["bounded"] * 3 + ["free"] * 5


def test_another_curriculum_is_refused_and_may_branch_off(tmp_path):
    trunk = run(tmp_path / "trunk")
    whole = []
    for update in trunk:
        whole.append(update)
        if update.step == 3:
            break
    other = Curriculum((bounded(2, 1, until=None),))
    with pytest.raises(ValueError, match="curriculum"):
        run(tmp_path / "trunk", curriculum=other)
    branch = run(tmp_path / "branch", curriculum=other)
    branch.origin = tmp_path / "trunk"
    branch.__post_init__()
    assert branch.step == 3
    updates = list(branch)
    assert updates[0].loss == next(iter(trunk)).loss  # both are still bounded
    assert {update.phase for update in updates} == {"bounded"}
    again = run(tmp_path / "branch", curriculum=other)
    assert again.step == 8
    branch.directory, branch.origin = tmp_path / "none", tmp_path / "nowhere"
    with pytest.raises(FileNotFoundError, match=r"origin must have a checkpoint, there is none in .*nowhere"):
        branch.__post_init__()


@pytest.mark.filterwarnings("ignore::deqseq.solution.ConvergenceWarning")
def test_a_loss_that_is_not_finite_stops_the_run_before_the_weights_change(tmp_path):
    made = run(tmp_path)
    for update in made:
        if update.step == 4:
            break
    made.model.embedding.weight.data[:] = float("nan")
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    with pytest.raises(NonFiniteLoss, match=r"the loss is nan after step 4 in phase 'free'.*checkpoint-00000003"):
        next(iter(made))
    for name, tensor in made.model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(7), before[name].nan_to_num(7))
    assert run(tmp_path).step == 3


def test_bfloat16_learns_with_float32_weights(tmp_path):
    made = run(tmp_path, bfloat16=True)
    found = losses(made)
    assert found[-1] < found[0]
    assert found != losses(run(tmp_path / "full"))
    assert {parameter.dtype for parameter in made.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "Settings.steps must be at least 1, got 0"),
        ({"batches_a_step": 0}, "Settings.batches_a_step must be at least 1"),
        ({"clip": 0.0}, "Settings.clip must be above 0, got 0.0"),
        ({"clip": float("nan")}, "Settings.clip must be above 0, got nan"),
    ],
)
def test_settings_that_make_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{"steps": 1, **changes})
