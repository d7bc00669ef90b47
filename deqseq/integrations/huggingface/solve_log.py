"""What the Trainer of transformers logs of the solves."""

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deqseq.integrations.huggingface.modeling import DeqseqModel, ImplicitModelOutput


class SolveLog(TrainerCallback):
    """Adds how the solves of training went to what a Trainer logs with its loss.

    ``iterations`` is their mean over the tokens that were solved, ``converged`` the share of rows,
    both since the last log; of several processes, of the one that logs. Importing
    :mod:`deqseq.integrations.huggingface` adds it to every Trainer; to the log of other models and
    of explicit ones it adds nothing. ``trainer.remove_callback(SolveLog)`` removes it.

    Example:
        >>> from transformers.trainer import DEFAULT_CALLBACKS
        >>> SolveLog in DEFAULT_CALLBACKS
        True
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._sums: list[Tensor] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the solves of the model from now on."""
        self.on_train_end(args, state, control)  # a run before may have ended in an error
        parts = [part for part in kwargs["model"].modules() if isinstance(part, DeqseqModel)]
        self._hooks = [part.register_forward_hook(self._count) for part in parts]

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()
        self._sums.clear()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
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
