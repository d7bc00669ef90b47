"""A curriculum for the Trainer of transformers."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from deqseq.check import check_type
from deqseq.integrations.fields import Fields
from deqseq.integrations.huggingface.blocks import checkpointed
from deqseq.integrations.huggingface.objects import Json, from_json, to_json
from deqseq.integrations.huggingface.pretrained_model import ImplicitPreTrainedModel
from deqseq.models import ImplicitModel
from deqseq.training import Curriculum, Phase, PoissonLogNormal

log = logging.getLogger(__name__)


class CurriculumCallback(TrainerCallback, ExportableState):
    """Trains the models of a Trainer by the phases of a curriculum.

    The phase is chosen, and its budget drawn if it has a ``depth``, before every step, from the steps, the fraction of
    ``max_steps``, or the tokens that the Trainer has counted. The Trainer's checkpoints contain it: a resumed run
    continues in its phase with the same draws, and resuming with another curriculum is an error. The configuration of
    the model follows, without draws, so that a checkpoint is loaded as the model that was trained. Activation
    checkpointing stays as the Trainer has set it. An explicit model is left as it is.

    Args:
        curriculum: the phases; or their JSON, as the Trainer finds it in a checkpoint with
            ``restore_callback_states_from_checkpoint=True``. The checkpoint's curriculum then replaces the given one.

    Raises:
        TypeError: a solver, gradient or sweep that a configuration cannot name; JSON with another type.
        ValueError: JSON with a missing field, an unknown name or a number out of its range.

    Example:
        >>> from deqseq.training import bounded, free
        >>> callback = CurriculumCallback(Curriculum((bounded(), free(24))))
        >>> callback.state()["attributes"]["saved"]["phase"]
        'bounded'

        ``Trainer(model, arguments, train_dataset=..., callbacks=[callback])``
    """

    def __init__(self, curriculum: Curriculum | Mapping[str, Any]) -> None:
        check_type("curriculum", curriculum, (Curriculum, Mapping), "Curriculum((bounded(), free()))")
        self.curriculum = curriculum if isinstance(curriculum, Curriculum) else _from_json(curriculum)
        self.saved = self.curriculum.record(0)
        self._json = _to_json(self.curriculum)  # what no checkpoint can name is refused before training
        self._phase: Phase | None = None
        self._checkpointing = False

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into ``trainer_state.json``."""
        return {"args": {"curriculum": self._json}, "attributes": {"saved": self.saved}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Enter the phase; ValueError for another curriculum than the checkpoint's, or tokens that nothing counts."""
        if self.curriculum.unit == "tokens" and str(args.include_num_input_tokens_seen) == "no":
            raise ValueError('a curriculum in tokens needs TrainingArguments(include_num_input_tokens_seen="all")')
        # a run that began without this callback has no entry, and the Trainer only fills existing ones
        states: Any = state.stateful_callbacks
        self.curriculum.resumed(states.setdefault(type(self).__name__, self.state())["attributes"]["saved"])
        model = kwargs["model"]
        # a first gradient without activations, such as Implicit, does not show what the Trainer has set
        recomputed = (part.solve != checkpointed(part.solve, enable=False) for part in _implicit(model))
        self._checkpointing = bool(args.activation_checkpointing) or any(recomputed)
        self._phase = None
        self._enter(model, state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Enter the phase that is due."""
        self._enter(kwargs["model"], state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the progress for a checkpoint after this step; a drawn budget ends with its step."""
        self.saved = self.curriculum.record(self._progress(state))
        if self._phase is not None and self._phase.depth is not None:
            self._apply(replace(self._phase, depth=None), kwargs["model"])

    def _enter(self, model: nn.Module, state: TrainerState) -> None:
        progress = self._progress(state)
        drawn = self.curriculum.at(progress)
        phase = next(part for part in self.curriculum.phases if part.name == drawn.name)
        if phase == self._phase and phase.depth is None:
            return
        self._apply(drawn, model)
        if phase == self._phase:
            return
        log.info("phase %r from step %d (%s: %s)", phase.name, state.global_step, self.curriculum.unit, progress)
        for part in model.modules():
            if isinstance(part, ImplicitPreTrainedModel):
                part.config.solve, part.config.eval_solve = phase.solve, phase.eval_solve
        self.saved, self._phase = self.curriculum.record(progress), phase

    def _apply(self, phase: Phase, model: nn.Module) -> None:
        phase.apply(model)
        if self._checkpointing:
            for part in _implicit(model):
                part.solve = checkpointed(part.solve)

    def _progress(self, state: TrainerState) -> float | int:
        if self.curriculum.unit == "tokens":
            return int(state.num_input_tokens_seen)
        if self.curriculum.unit == "steps":
            return state.global_step
        return min(1.0, state.global_step / state.max_steps)  # the Trainer resumes a finished run with one more update


def _implicit(model: nn.Module) -> list[ImplicitModel]:
    return [part for part in model.modules() if isinstance(part, ImplicitModel)]


def _to_json(curriculum: Curriculum) -> Json:
    phases = [
        {name: to_json(value) for name, value in vars(phase).items() if name != "depth"}
        | {"depth": phase.depth and {name: to_json(value) for name, value in asdict(phase.depth).items()}}
        for phase in curriculum.phases
    ]
    return {"unit": curriculum.unit, "phases": phases}


def _from_json(data: Mapping[str, Any]) -> Curriculum:
    content = _content(Curriculum, data, "curriculum: ")
    check_type("curriculum: phases", content["phases"], (list, tuple))
    phases = [_phase(phase, f"curriculum: phase {place}: ") for place, phase in enumerate(content["phases"], 1)]
    return Curriculum(tuple(phases), content["unit"])


def _phase(data: Mapping[str, Any], where: str) -> Phase:
    content = _content(Phase, data, where)
    for name in ("solve", "eval_solve"):
        if content[name] is not None:
            content[name] = from_json("solve", content[name], f"{where}{name}")
    if content["depth"] is not None:
        content["depth"] = PoissonLogNormal(**_content(PoissonLogNormal, content["depth"], f"{where}depth: "))
    return Phase(**content)


def _content(made: type[Any], data: Mapping[str, Any], where: str) -> Json:
    """All fields of a dataclass; a missing or unknown one is an error."""
    known = Fields(data, where)
    content = {field.name: known.get(field.name) for field in fields(made)}
    known.close()
    return content
