"""A curriculum for the Trainer of transformers."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from deqseq.gradients import Phantom, Unrolled
from deqseq.integrations.huggingface.modeling import ImplicitPreTrainedModel
from deqseq.integrations.huggingface.objects import Kind, from_json, to_json
from deqseq.models import ImplicitModel
from deqseq.training import Curriculum, Phase

log = logging.getLogger(__name__)

PARTS: dict[str, Kind] = {"stop": "stop", "gradient": "gradient", "solver": "solver", "eval_stop": "stop"}
"""The fields of a phase that hold our objects."""


class CurriculumCallback(TrainerCallback, ExportableState):
    """Makes the models of a Trainer train by the phases of a curriculum.

    The phase is chosen before every step, from the steps, the fraction of ``max_steps``, or the tokens that the
    Trainer has counted. The Trainer's checkpoints hold it: a resumed run goes on in the phase it was in, and a run
    that is resumed with another curriculum is refused. The configuration of a model of this library follows, so that
    a checkpoint is loaded as the model that was trained. Activation checkpointing stays as the Trainer has set it; an
    explicit model is left as it is.

    Args:
        curriculum: the phases; or their JSON, as the Trainer finds it in a checkpoint when it is told
            ``restore_callback_states_from_checkpoint=True``. The checkpoint's curriculum then replaces the given one.

    Raises:
        TypeError: a solver or gradient that a configuration cannot name.
        ValueError: JSON with an unknown name or a number out of its range.

    Example:
        >>> from deqseq.training import bounded, free
        >>> callback = CurriculumCallback(Curriculum((bounded(), free(24))))
        >>> callback.state()["attributes"]["saved"]["phase"]
        'bounded'

        ``Trainer(model, arguments, train_dataset=..., callbacks=[callback])``
    """

    def __init__(self, curriculum: Curriculum | Mapping[str, Any]) -> None:
        self.curriculum = curriculum if isinstance(curriculum, Curriculum) else _from_json(curriculum)
        self.saved = self.curriculum.record(0)
        self._json = _to_json(self.curriculum)  # refuses what no checkpoint can name before anything is trained
        self._phase: Phase | None = None
        self._checkpointing = False

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into ``trainer_state.json``."""
        return {"args": {"curriculum": self._json}, "attributes": {"saved": self.saved}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check the curriculum against the checkpoint's, and enter the phase.

        Raises:
            ValueError: the checkpoint was trained with another curriculum, or tokens are wanted and not counted.
        """
        if self.curriculum.unit == "tokens" and str(args.include_num_input_tokens_seen) == "no":
            raise ValueError(
                'a curriculum in tokens needs TrainingArguments(include_num_input_tokens_seen="all"), which counts them'
            )
        # a run that began without this callback has no entry, and the Trainer fills those that are there
        states: Any = state.stateful_callbacks
        self.curriculum.resumed(states.setdefault(type(self).__name__, self.state())["attributes"]["saved"])
        model = kwargs["model"]
        self._checkpointing = any(
            part.gradient.recomputes for part in model.modules() if isinstance(part, ImplicitModel)
        )
        self._phase = None
        self._enter(model, state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Enter the phase that is due."""
        self._enter(kwargs["model"], state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the progress, which a checkpoint after this step is to hold."""
        self.saved = self.curriculum.record(self._progress(state))

    def _enter(self, model: nn.Module, state: TrainerState) -> None:
        progress = self._progress(state)
        phase = self.curriculum.at(progress)
        if phase == self._phase:
            return
        log.info("phase %r from step %d (%s: %s)", phase.name, state.global_step, self.curriculum.unit, progress)
        (_recomputing(phase) if self._checkpointing else phase).apply(model)
        for part in model.modules():
            if isinstance(part, ImplicitPreTrainedModel):
                _write_down(phase, part)
        self.saved, self._phase = self.curriculum.record(progress), phase

    def _progress(self, state: TrainerState) -> float | int:
        if self.curriculum.unit == "tokens":
            return int(state.num_input_tokens_seen)
        return state.global_step if self.curriculum.unit == "steps" else state.global_step / state.max_steps


def _recomputing(phase: Phase) -> Phase:
    """The phase with activation checkpointing, where its gradient has any."""
    if not isinstance(phase.gradient, Phantom | Unrolled):
        return phase
    return replace(phase, gradient=replace(phase.gradient, checkpoint=True))


def _write_down(phase: Phase, model: ImplicitPreTrainedModel) -> None:
    for name in PARTS:
        value = getattr(phase, name)
        if value is not None:
            setattr(model.config, name, value)


def _to_json(curriculum: Curriculum) -> dict[str, Any]:
    phases = []
    for phase in curriculum.phases:
        parts = {name: getattr(phase, name) for name in PARTS}
        named = {name: None if part is None else to_json(part) for name, part in parts.items()}
        phases.append({"name": phase.name, "until": phase.until, **named})
    return {"unit": curriculum.unit, "phases": phases}


def _from_json(data: Mapping[str, Any]) -> Curriculum:
    phases = []
    for phase in data["phases"]:
        parts = {
            name: from_json(PARTS[name], value, f"phase {phase['name']!r}: {name}")
            for name, value in phase.items()
            if name in PARTS and value is not None
        }
        phases.append(Phase(**{**phase, **parts}))
    return Curriculum(tuple(phases), data["unit"])
