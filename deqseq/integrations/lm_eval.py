"""lm-eval's model of transformers, with a choice of how implicit models are solved, and a count of
their solves.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from deqseq.arguments import AtLeast, checked
from deqseq.config import SolveConfig
from deqseq.integrations.huggingface import (
    DeqseqForCausalLM,
    ImplicitCache,
    ImplicitCausalLMOutput,
    WindowedOutput,
)
from deqseq.models import Generation
from deqseq.models.generation import width_of
from deqseq.rows import take
from deqseq.solution import SolveStats, Status

try:
    HFLM: Any = import_module(
        "lm_eval.models.huggingface"
    ).HFLM  # of a class that type checkers cannot see
except ImportError as error:
    raise ImportError(
        'deqseq.integrations.lm_eval needs lm-eval: pip install "deqseq[eval]"'
    ) from error


class SolvedLM(HFLM):
    """lm-eval's model of transformers, with a choice of how each pass is solved, and a count of the
    solves.

    Texts of one length are solved together, without the padding of lm-eval: the score of a text
    does not depend on the rest of its batch, and only text is counted.

    Args:
        model: a causal language model of transformers, possibly with PEFT's adapters.
        tokenizer: its tokenizer.
        solve: a :class:`deqseq.SolveConfig`, or a mapping of the fields to replace. Default: the
            model's own.
        window: how many tokens of a text are generated together. Default: as
            :meth:`deqseq.CausalLM.generate` chooses.
        batch_size: texts that are solved together, at most; ``"auto"``: as many as fit into memory.
        max_length: tokens of a text, without the last. Default: that of the model or the tokenizer,
            or 2048.

    Raises:
        ValueError: ``solve`` or ``window`` for a model that is not implicit; an unknown name or
            field in ``solve``; a ``window`` that it excludes.

    Example:
        >>> lm = SolvedLM(model, tokenizer, {"sweep": dq.Sliding(8)})  # doctest: +SKIP
        >>> results = lm_eval.simple_evaluate(model=lm, tasks=["piqa"])  # doctest: +SKIP
        >>> lm.tally()["converged"]  # doctest: +SKIP
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        solve: SolveConfig | Mapping[str, Any] | None = None,
        *,
        window: Annotated[int, AtLeast(1)] | None = None,
        batch_size: Annotated[int, AtLeast(1)] | str = 16,
        max_length: Annotated[int, AtLeast(1)] | None = None,
    ) -> None:
        own = [part.model for part in model.modules() if isinstance(part, DeqseqForCausalLM)]
        if (solve or (window or 1) > 1) and not own:
            name = "solve" if solve else "window"
            raise ValueError(
                f"leave out {name}: {type(model).__name__} is no implicit model of deqseq"
            )
        config = own[0].solve_config(solve or {}) if own and (solve or own[0].solved) else None
        width = width_of(window, config)
        super().__init__(
            model, "causal", tokenizer=tokenizer, batch_size=batch_size, max_length=max_length
        )
        self.options, self.windows = (
            {"solve": solve} if solve else {},
            {"window": width} if width > 1 else {},
        )
        self.bare, self.counted = False, defaultdict[str, float](float)

    def tally(self) -> dict[str, float | None]:
        """Mean iterations and updates per token, shares of rows and tokens, calls of the map; None
        without a solve.

        Of what is decoded in windows every token is a solve of its own, and updates go on until all
        rows have ended.
        """
        names = ("self_iterations", "token_updates", "converged", "converged_tokens", "diverged")
        of = {
            name: self.counted[name] / whole if (whole := self.counted[f"{name} of"]) else None
            for name in names
        }
        return of | {"evaluations": self.counted["evaluations"] or None}

    def _count(
        self,
        stats: SolveStats | None,
        status: torch.Tensor | None,
        mask: torch.Tensor | None = None,
    ) -> None:
        """Count a solve, if there was one, of the real tokens."""
        if stats is None or status is None:
            return
        parts = {"self_iterations": stats.iterations, "token_updates": stats.updates}
        parts |= {"converged_tokens": None if stats.forced is None else ~stats.forced}
        parts |= {"converged": status == Status.CONVERGED, "diverged": status == Status.DIVERGED}
        for name, each in parts.items():
            if each is not None:
                each = each if mask is None or mask.shape != each.shape else each[mask]
                self._add(name, each, each.numel())
        self.counted["evaluations"] += stats.evaluations

    def _count_generation(self, found: Generation, lengths: list[int]) -> None:
        """Count what was decoded in windows, of each row the tokens before its end."""
        real = torch.arange(found.tokens.shape[1]) < torch.tensor(lengths)[:, None]
        real, tokens, parts = (
            real.to(found.tokens.device),
            int(real.sum()),
            dict[str, Any](vars(found)),
        )
        self._add("self_iterations", parts["iterations"][real], tokens)
        self._add("converged", parts["converged"][real], tokens)
        self._add("token_updates", parts["updates"], tokens)
        self.counted["evaluations"] += parts["evaluations"]

    def _add(self, name: str, each: torch.Tensor, of: int) -> None:
        self.counted[name] += each.sum().item()
        self.counted[f"{name} of"] += of

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, *args: Any, **kwargs: Any
    ) -> list[int]:
        """As in lm-eval, and also for a tokenizer with neither BOS nor EOS token."""
        if add_special_tokens is None and (self.bare or self.prefix_token_id is None):
            add_special_tokens = not self.bare
        return super().tok_encode(string, add_special_tokens, *args, **kwargs)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """As in lm-eval, without the tokenizer's own first token: lm-eval adds one, and the other
        would be scored.
        """
        self.bare = True
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self.bare = False

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        by_length: dict[int, list[int]] = defaultdict(list)
        for place, (_, context, continuation) in enumerate(requests):
            if None in context:
                raise ValueError(
                    "an empty context needs a token to begin with, and the tokenizer has neither "
                    "BOS nor EOS token"
                )
            if (tokens := len(continuation)) > self.max_length:
                raise ValueError(
                    f"a continuation of {tokens} tokens is longer than the --max-length "
                    f"{self.max_length}"
                )
            by_length[min(len(context) + len(continuation), self.max_length + 1)].append(place)
        answers = {}
        with tqdm(total=len(requests), disable=None, leave=False, desc="texts") as bar:
            for _, places in sorted(by_length.items(), reverse=True):
                found = super()._loglikelihood_tokens(
                    [requests[place] for place in places], True, override_bs
                )
                answers |= zip(places, found, strict=True)
                bar.update(len(places))
        return [answers[place] for place in range(len(requests))]

    def _model_call(
        self, inps: torch.Tensor, attn_mask: object = None, labels: object = None
    ) -> torch.Tensor:
        with torch.no_grad():
            output = self.model(inps, use_cache=False, **self.options)
        logits = output.logits
        if isinstance(output, ImplicitCausalLMOutput):
            self._count(output.stats, output.status)
        return logits

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any
    ) -> torch.Tensor:
        kwargs |= {"return_dict_in_generate": True, **self.options, **self.windows}
        output: Any = super()._model_generate(context, max_length, stop, **kwargs)
        if isinstance(output, WindowedOutput) and output.generation is not None:
            self._count_generation(output.generation, self._ends(output.generation.tokens, stop))
        elif isinstance(output.cache, ImplicitCache):
            ends = torch.tensor(
                self._ends(output.sequences[:, context.shape[1] :], stop), device=context.device
            )
            for known, solve in enumerate(output.cache.solves):
                counted: Any = (solve.stats, solve.status, kwargs["attention_mask"].bool())
                beams = len(solve.status) != len(ends)  # which end together
                self._count(
                    *(counted[:2] if beams else take(counted, (ends > known).nonzero()[:, 0]))
                )
        return output.sequences

    def _ends(self, tokens: torch.Tensor, stop: list[str]) -> list[int]:
        """How many new tokens each row has when it ends; the batch goes on until all of its rows
        have ended.
        """

        def ended(row: list[int]) -> bool:
            return any(end in self.tok_decode(row, skip_special_tokens=False) for end in stop)

        counts = range(tokens.shape[1] + 1)
        return [
            bisect_left(counts, True, key=lambda count, row=row: ended(row[:count]))
            for row in tokens.tolist()
        ]

    def _detect_batch_size(self, *args: Any, **kwargs: Any) -> int:
        """As in lm-eval, for ``batch_size="auto"``; its trials are not counted."""
        kept = self.counted.copy()
        try:
            return super()._detect_batch_size(*args, **kwargs)
        finally:
            self.counted = kept
