"""lm-eval's model of transformers, which solves implicit models as told and counts the solves."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from deqseq.arguments import PositiveInt, checked
from deqseq.config import SolveConfig
from deqseq.integrations.huggingface import (
    DeqseqForCausalLM,
    ImplicitCache,
    ImplicitCausalLMOutput,
    WindowedOutput,
)
from deqseq.models.generation import width_of
from deqseq.rows import take
from deqseq.solution import Status

try:
    # type checkers take the class for Any, with or without lm-eval
    HFLM: Any = import_module("lm_eval.models.huggingface").HFLM
except ImportError as error:
    raise ImportError(
        'deqseq.integrations.lm_eval needs lm-eval: pip install "deqseq[eval]"'
    ) from error


class SolvedLM(HFLM):
    """lm-eval's model of transformers, which solves with a given configuration and counts
    iterations.

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
        max_length: the most tokens of a text that the model is given; the last token of a text is
            only predicted. Default: that of the model or the tokenizer, or 2048.

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
        window: PositiveInt | None = None,
        batch_size: PositiveInt | str = 16,
        max_length: PositiveInt | None = None,
    ) -> None:
        ours = [module.model for module in model.modules() if isinstance(module, DeqseqForCausalLM)]
        if not ours and (solve or (window or 1) > 1):
            name = "solve" if solve else "window"
            raise ValueError(
                f"leave out {name}: {type(model).__name__} is no implicit model of deqseq"
            )
        config = None
        if ours and (solve or ours[0].solved):
            config = ours[0].solve_config(solve or {})
        width = width_of(window, config)
        super().__init__(
            model, "causal", tokenizer=tokenizer, batch_size=batch_size, max_length=max_length
        )
        self.options = {"solve": solve} if solve else {}
        self.windows = {"window": width} if width > 1 else {}
        self.counted = defaultdict[str, float](float)

    def tally(self) -> dict[str, float | None]:
        """Numbers of all solves so far: means over tokens, ``self_iterations`` and
        ``token_updates``; shares of rows, ``converged`` and ``diverged``; a share of tokens,
        ``converged_tokens``; and calls of the map, ``evaluations``.

        Each is None without a solve. Where tokens are decoded in windows, every token is a solve of
        its own, a row in these shares, and updates go on until all rows have ended.
        """
        names = ("self_iterations", "token_updates", "converged", "converged_tokens", "diverged")
        means: dict[str, float | None] = {}
        for name in names:
            count = self.counted[f"{name} of"]
            means[name] = self.counted[name] / count if count else None
        return means | {"evaluations": self.counted["evaluations"] or None}

    def _count(self, name: str, values: Tensor, real: Tensor | None = None) -> None:
        """Count numbers of rows, or of the real tokens of rows."""
        if real is not None and real.shape == values.shape:
            values = values[real]
        self.counted[name] += values.sum().item()
        self.counted[f"{name} of"] += values.numel()

    def _count_solve(self, stats: Any, status: Tensor, real: Tensor | None = None) -> None:
        self.counted["evaluations"] += stats.evaluations
        self._count("self_iterations", stats.iterations, real)
        self._count("token_updates", stats.updates, real)
        self._count("converged_tokens", ~stats.forced, real)
        self._count("converged", status == Status.CONVERGED)
        self._count("diverged", status == Status.DIVERGED)

    def _count_generation(self, generation: Any, ends: Tensor) -> None:
        """Count what was decoded in windows: in each row the tokens before its end."""
        real = torch.arange(generation.tokens.shape[1], device=ends.device) < ends[:, None]
        self.counted["evaluations"] += generation.evaluations
        self._count("self_iterations", generation.iterations, real)
        self._count("converged", generation.converged, real)
        self.counted["token_updates"] += generation.updates.sum().item()
        self.counted["token_updates of"] += real.sum().item()

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, *args: Any, **kwargs: Any
    ) -> list[int]:
        """As in lm-eval, and also for a tokenizer with neither BOS nor EOS token."""
        if self.prefix_token_id is None and add_special_tokens is None:
            add_special_tokens = True
        return super().tok_encode(string, add_special_tokens, *args, **kwargs)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """As in lm-eval, without the tokenizer's own first token, which would be scored."""
        adds_bos_token = self.add_bos_token
        self.add_bos_token = False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self.add_bos_token = adds_bos_token

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            tokens = len(continuation)
            if None in context:
                raise ValueError(
                    "an empty context needs a token to begin with, and the tokenizer has neither "
                    "BOS nor EOS token"
                )
            if tokens > self.max_length:
                raise ValueError(
                    f"a continuation of {tokens} tokens is longer than the --max-length "
                    f"{self.max_length}"
                )
            by_length[min(len(context) + tokens, self.max_length + 1)].append(index)
        answers = {}
        with tqdm(total=len(requests), disable=None, leave=False, desc="texts") as bar:
            for _, indices in sorted(by_length.items(), reverse=True):
                texts = [requests[index] for index in indices]
                scores = super()._loglikelihood_tokens(texts, True, override_bs)
                answers |= zip(indices, scores, strict=True)
                bar.update(len(indices))
        return [answers[index] for index in range(len(requests))]

    def _model_call(self, inps: Tensor, attn_mask: object = None, labels: object = None) -> Any:
        with torch.no_grad():
            output = self.model(inps, use_cache=False, **self.options)
        if isinstance(output, ImplicitCausalLMOutput) and output.status is not None:
            self._count_solve(output.stats, output.status)
        return output.logits

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any
    ) -> Tensor:
        kwargs |= {"return_dict_in_generate": True, **self.options, **self.windows}
        output: Any = super()._model_generate(context, max_length, stop, **kwargs)
        solves = output.cache.solves if isinstance(output.cache, ImplicitCache) else ()
        if not solves and not isinstance(output, WindowedOutput):
            return output.sequences
        ends = self._ends(output.sequences[:, context.shape[1] :], stop)
        if isinstance(output, WindowedOutput):
            self._count_generation(output.generation, ends)
        for step, solve in enumerate(solves):
            numbers = solve.stats, solve.status, kwargs["attention_mask"].bool()
            if len(solve.status) == len(ends):  # beams end together
                numbers = take(numbers, (ends > step).nonzero()[:, 0])
            self._count_solve(*numbers)
        return output.sequences

    def _ends(self, tokens: Tensor, stop: list[str]) -> Tensor:
        """How many new tokens each row has when it ends, before the batch does."""
        lengths = []
        for row in tokens.tolist():

            def ended(count: int, row: list[int] = row) -> bool:
                text = self.tok_decode(row[:count], skip_special_tokens=False)
                return any(end in text for end in stop)

            lengths.append(bisect_left(range(len(row) + 1), True, key=ended))
        return torch.tensor(lengths, device=tokens.device)

    def _detect_batch_size(self, *args: Any, **kwargs: Any) -> int:
        """As in lm-eval, for ``batch_size="auto"``; its trials are not counted."""
        counted = self.counted.copy()
        try:
            return super()._detect_batch_size(*args, **kwargs)
        finally:
            self.counted = counted
