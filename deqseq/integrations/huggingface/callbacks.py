"""Callbacks for the Trainer of transformers: a curriculum, and what is logged of the solves."""

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from difflib import unified_diff
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from deqseq.arguments import checked
from deqseq.as_json import from_json, to_json
from deqseq.integrations.huggingface.modeling import DeqseqModel, ImplicitModelOutput
from deqseq.training import Curriculum, Phase

log = logging.getLogger(__name__)


class CurriculumCallback(TrainerCallback, ExportableState):
    """Trains the model of a Trainer by the phases of a curriculum; explicit models do not change.

    The phase is chosen before every step, and its budget drawn if it has a ``depth``. The Trainer's
    checkpoints contain the curriculum: a resumed run continues in its phase with the same draws,
    and resuming with another curriculum is an error. Checkpoints are saved with the phase's own
    budget, not a drawn one. Fractions are those of ``max_steps``; ends in tokens need
    ``TrainingArguments(include_num_input_tokens_seen="all")``.

    Args:
        curriculum: the phases; or their JSON, as the Trainer finds it in a checkpoint with
            ``restore_callback_states_from_checkpoint=True``. The checkpoint's curriculum then
            replaces the given one.

    Raises:
        TypeError, ValueError: what a configuration cannot name; JSON that does not fit.

    Example:
        >>> from deqseq.integrations.huggingface import CurriculumCallback
        >>> from deqseq.training import Curriculum
        >>> from deqseq.training import bounded, free
        >>> callback = CurriculumCallback(Curriculum((bounded(), free(24))))
        >>> callback.state()["args"]["curriculum"]["unit"]
        'fraction'

        ``Trainer(model, arguments, train_dataset=..., callbacks=[callback])``
    """

    @checked
    def __init__(self, curriculum: Curriculum | Mapping[str, Any]) -> None:
        self.curriculum: Curriculum = from_json("curriculum", curriculum, "curriculum")
        # what a checkpoint cannot name is refused before training
        self._json = to_json(self.curriculum)
        self._phase: Phase | None = None

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into ``trainer_state.json``."""
        return {"args": {"curriculum": self._json}, "attributes": {}}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Enter the phase; ValueError for another curriculum than the checkpoint's, or tokens that
        nothing counts.
        """
        if self.curriculum.unit == "tokens" and str(args.include_num_input_tokens_seen) == "no":
            raise ValueError(
                "a curriculum in tokens needs "
                'TrainingArguments(include_num_input_tokens_seen="all")'
            )
        states: Any = state.stateful_callbacks
        # a run that began without this callback has no entry, and the Trainer only fills those
        # that exist
        entry = states.setdefault(type(self).__name__, self.state())
        self._check_same(entry["args"]["curriculum"])
        self._phase = None
        self._enter(kwargs["model"], state)

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        """Enter the phase that is due."""
        self._enter(kwargs["model"], state)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """End a drawn budget with its step."""
        if self._phase is not None and self._phase.depth is not None:
            replace(self._phase, depth=None).apply(kwargs["model"])

    def _check_same(self, trained: Any) -> None:
        """Refuse another curriculum than the ``trained`` one, a checkpoint's JSON."""
        if trained == self._json:
            return
        old, new = (  # the Trainer sorts its file
            json.dumps(curriculum, indent=1, sort_keys=True).splitlines()
            for curriculum in (trained, self._json)
        )
        changes = "\n".join(unified_diff(old, new, "checkpoint", "this run", lineterm=""))
        raise ValueError(
            "the curriculum is not the one that the checkpoint was trained with: resume with that "
            f"one, or begin a new run from these weights\n{changes}"
        )

    def _enter(self, model: nn.Module, state: TrainerState) -> None:
        progress = self._progress(state)
        drawn = self.curriculum.at(progress)
        phase = next(phase for phase in self.curriculum.phases if phase.name == drawn.name)
        if phase == self._phase and phase.depth is None:
            return
        drawn.apply(model)
        if phase != self._phase:
            amount = f"{self.curriculum.unit}: {progress}"
            log.info("phase %r from step %d (%s)", phase.name, state.global_step, amount)
            self._phase = phase

    def _progress(self, state: TrainerState) -> float | int:
        if self.curriculum.unit == "tokens":
            return int(state.num_input_tokens_seen)
        if self.curriculum.unit == "steps":
            return state.global_step
        # the Trainer resumes a finished run with one more update
        return min(1.0, state.global_step / state.max_steps)


class SolveLog(TrainerCallback):
    """Adds ``iterations`` and ``converged`` of the training solves to the losses a Trainer logs.

    These are the mean number of iterations per solved token and the share of rows that converged,
    since the last log; with several processes, of the one that logs. Importing
    :mod:`deqseq.integrations.huggingface` adds it to every Trainer. For explicit models, and those
    of other libraries, nothing is logged. ``trainer.remove_callback(SolveLog)`` removes it.

    Example:
        >>> from deqseq.integrations.huggingface import SolveLog
        >>> from transformers.trainer import DEFAULT_CALLBACKS
        >>> SolveLog in DEFAULT_CALLBACKS
        True
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._sums: list[Tensor] = []

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Count the solves of the model from now on."""
        self.on_train_end(args, state, control)  # a run before may have ended in an error
        parts = [part for part in kwargs["model"].modules() if isinstance(part, DeqseqModel)]
        self._hooks = [part.register_forward_hook(self._count) for part in parts]

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()
        self._sums.clear()

    def on_log(self, args, state, control, **kwargs) -> None:
        """Add the numbers to the entry of a training loss."""
        logs = kwargs["logs"]
        if "loss" not in logs or not self._sums:
            return
        iterations, tokens, converged, rows = torch.stack(self._sums).sum(dim=0).tolist()
        self._sums.clear()
        numbers = {"iterations": iterations / max(tokens, 1), "converged": converged / rows}
        logs.update(numbers)
        state.log_history[-1].update(numbers)  # it has a copy

    def _count(self, model: DeqseqModel, _: Any, output: Any) -> None:
        if not model.training or not isinstance(output, ImplicitModelOutput):
            return
        if output.stats is None:
            return
        iterations, converged = output.stats.iterations, output.converged
        rows = converged.new_tensor(len(converged), dtype=torch.int64)
        solved = (iterations > 0).sum()
        self._sums.append(torch.stack([iterations.sum(), solved, converged.sum(), rows]))
