"""Language models: tokens in, predictions out."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Unpack

import torch
from jaxtyping import Float, Int64, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from deqseq.arguments import (
    Between,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    Within,
    check_ids,
    check_integer,
    check_like,
    check_type,
    checked,
    shown,
)
from deqseq.backbones.base import Cache, check_narrow
from deqseq.config import SolveConfig, SolveFields
from deqseq.models.base import Model, check_loaded, refuse_setting
from deqseq.models.eval_mode import eval_mode
from deqseq.models.generation import generate, up_to_stop
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import CausalLMOutput, Generation, NewTokens
from deqseq.models.padding import check_mask
from deqseq.models.recurrent_depth import check_adapters, solved_part
from deqseq.models.sampler import Sampler, Seed
from deqseq.step import Callback
from deqseq.types import Mask, Sequence, float32_at_least, is_dense

Tokens = Integer[Tensor, "batch length"]
"""Token ids, ``(batch, length)``: int64, int32, int16, int8 or uint8."""
TRANSFORMERS = ("save_pretrained", "push_to_hub", "config", "generation_config")
"""Attributes that users of transformers expect."""
IGNORED = -100
"""The label or target of a token that is left out of the loss."""


class TokenModel(nn.Module):
    """A model between an embedding and a head; how it is solved is set on the model itself."""

    model: Model

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_setting(self, name)
        super().__setattr__(name, value)

    @property
    def core(self) -> ImplicitModel | None:
        """The part that is solved: the model itself or its core; None for an explicit model."""
        return solved_part(self.model)

    def compile(self, **options: Any) -> None:
        """Compile the blocks of the model; ``options`` are those of ``torch.compile``."""
        self.model.compile(**options)


class CausalLM(TokenModel):
    """An embedding, a model, and a head without bias.

    Args:
        vocab_size: number of tokens.
        model: an :class:`ImplicitModel`, :class:`ExplicitModel` or :class:`RecurrentDepth`.
        embedding_std: standard deviation of the initial embedding.
        tied: whether the head has the embedding's weights, as in the paper; ``head`` is then None.
        embedding_dropout: probability that an element of an embedded token is zero in training;
            drawn once, before the solve.
        embedding_scale: factor of the embedded tokens, first rounded to their dtype, as in Gemma.
        logit_softcap: bound of the logits, which become ``cap * tanh(logits / cap)``, as in Gemma
            2. Default: none.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range.

    Example:
        >>> import torch, deqseq as dq
        >>> backbone = dq.Mamba2(dq.Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(backbone))
        >>> output = lm(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]]))
        >>> output.logits.shape, output.loss.ndim
        (torch.Size([1, 3, 10]), 0)
    """

    @checked
    def __init__(
        self,
        vocab_size: PositiveInt,
        model: Model,
        embedding_std: NonNegativeFloat = 0.02,
        *,
        tied: bool = True,
        embedding_dropout: Probability = 0.0,
        embedding_scale: PositiveFloat = 1.0,
        logit_softcap: PositiveFloat | None = None,
    ) -> None:
        super().__init__()
        self.embedding_dropout, self.embedding_scale = embedding_dropout, embedding_scale
        self.logit_softcap = logit_softcap
        self.embedding = nn.Embedding(vocab_size, model.d_model)
        nn.init.normal_(self.embedding.weight, std=embedding_std)
        self.model = model
        self.head = None if tied else nn.Linear(model.d_model, vocab_size, bias=False)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=embedding_std)

    def __getattr__(self, name: str) -> Any:
        if name in TRANSFORMERS:
            raise AttributeError(
                f"a CausalLM has no {name}: a model of transformers has it, which "
                "deqseq.integrations.huggingface.from_causal_lm(lm) makes of it"
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "model" and isinstance(value, Model):
            if not value.causal:
                raise ValueError(
                    "model must be causal, or its tokens would see those that they predict: a "
                    "TokenClassifier takes models in both directions"
                )
            if (core := solved_part(value)) is not None:
                check_narrow("model", core.backbone)
        if name == "peft_config":
            check_adapters(self.model, value)
        if name in ("embedding", "head") and value is not None:
            check_type(f"CausalLM.{name}", value, nn.Module)
            check_type(f"the weight of CausalLM.{name}", getattr(value, "weight", None), Tensor)
        if name == "embedding":
            size = getattr(value, "num_embeddings", None)
            check_integer("CausalLM.embedding.num_embeddings", size, 1)
        part: Any = value  # one that is absent, too
        super().__setattr__(name, part)

    @checked
    def forward(
        self,
        input_ids: Tokens,
        *,
        labels: Tokens | None = None,
        targets: Tokens | None = None,
        mask: Mask | None = None,
        cache: Cache | None = None,
        return_cache: bool = False,
        callback: Callback | None = None,
        throw: bool = False,
        solve: SolveConfig | None = None,
        **fields: Unpack[SolveFields],
    ) -> CausalLMOutput:
        """Predict a token at every position.

        Args:
            input_ids: token ids, 0 to ``vocab_size - 1``, ``(batch, length)``.
            labels: token ids, usually ``input_ids``, ``(batch, length)``: the logits at ``t - 1``
                are scored against the label at ``t``.
            targets: token ids, as in state tracking, ``(batch, length)``: the logits at ``t`` are
                scored against the target at ``t``. In both, -100 and padding are left out of the
                loss.
            mask: bool, True at real tokens, ``(batch, length)``; padding may be anywhere in a
                row. Default: no padding.
            cache: the ``cache`` of the :class:`CausalLMOutput` for the tokens before. Default:
                ``input_ids`` begin the sequence.
            return_cache: whether to return the cache after these tokens.
            callback: called at every check, as in :meth:`deqseq.ImplicitModel.forward`.
            throw: whether rows that spent their budget or diverged raise an error.
            solve: replaces the model's :class:`SolveConfig` for this call.
            **fields: fields of :class:`SolveConfig` to replace for this call. An explicit model
                takes neither these nor ``callback``, ``throw`` and ``solve``.

        Returns:
            Logits, the loss if labels or targets were given, cache and statistics.

        Raises:
            ValueError: a bad shape, ids outside the vocabulary, both labels and targets, or nothing
                to score.
            TypeError: an option that the model does not take.
            ConvergenceError: with ``throw``, as in :meth:`deqseq.ImplicitModel.forward`.
            NotImplementedError: a cache, or a sweep other than :class:`Simultaneous`, with a
                backbone that has no ``advance``.
        """
        input_ids = self._token_ids(input_ids)
        answers = self._answers(input_ids, labels, targets, mask)
        x = F.dropout(self.embed(input_ids), self.embedding_dropout, self.training)
        options: dict[str, Any] = {"callback": callback, "throw": throw, "solve": solve, **fields}
        output = self.model(x, mask=mask, cache=cache, return_cache=return_cache, **options)
        logits, loss = self.logits(output.value), None
        if answers is not None:
            loss = cross_entropy(logits[:, : answers.shape[1]], answers)
        return CausalLMOutput(logits, loss, output.cache, output.stats, output.status, output.call)

    @checked
    @torch.no_grad()
    def generate(
        self,
        input_ids: Tokens,
        *,
        max_new_tokens: PositiveInt,
        window: PositiveInt | None = None,
        mask: Mask | None = None,
        cache: Cache | None = None,
        temperature: NonNegativeFloat = 0.0,
        top_k: PositiveInt | None = None,
        top_p: Annotated[float, Within("(0, 1]")] | None = None,
        seed: Seed | None = None,
        stop_tokens: int | Iterable[int] = (),
        pad_token: Annotated[int, Between(-(2**63), 2**63 - 1)] = 0,
        callback: Callable[[NewTokens], None] | None = None,
        solve: SolveConfig | None = None,
        **fields: Unpack[SolveFields],
    ) -> Generation:
        """Continue a batch of prompts; the new tokens are solved in windows.

        In every iteration, each token's state predicts the next token, which becomes the input at
        the next position. The first tokens of the window are committed when they have converged and
        their inputs no longer change. So, up to the tolerance, the result is the same as with one
        token after another, in fewer evaluations of more tokens each. Greedy generation equals the
        argmax of a full forward pass. Each row moves on independently. The call puts the model in
        eval mode in all threads: if another thread trains it, generate with a copy.

        Args:
            input_ids: prompts, ``(batch, length)``.
            max_new_tokens: the largest number of new tokens per row.
            window: how many tokens are iterated together. With 1, each token is solved before the
                next is chosen. Default: 8, but 1 where a window is an error: an explicit model, a
                solver of another library, no tolerance, or ``start="input"``. Next tokens are
                chosen every ``stop.check_every`` iterations; in a :class:`~deqseq.RecurrentDepth`,
                at most at every second one; with a solver that ``combines`` points, at every one.
            mask: bool, True at real tokens of the prompts, ``(batch, length)``, for prompts of
                unequal length; padding may be anywhere. Default: no padding.
            cache: cache of the tokens before the prompts, as returned by a call of the model.
                Default: the prompts begin the sequence.
            temperature: divides the logits; with 0 the most probable token is taken.
            top_k: draw among this many of the most probable tokens; needs a ``temperature``.
                Default: all.
            top_p: draw among the most probable tokens that together have this probability; needs a
                ``temperature``. Default: all.
            seed: seed of the draws, -2**63 to 2**64 - 1. The draws of a row depend on it and on the
                row's position in the batch, not on the window or other rows. Default: torch's
                global generator.
            stop_tokens: each row ends with the first of these that it generates.
            pad_token: fills the rows that have ended.
            callback: called with :class:`NewTokens` when tokens are committed.
            solve: replaces the model's :class:`SolveConfig`.
            **fields: fields of :class:`SolveConfig` to replace. ``sweep`` is used for the prompts.
                Default: the model's, but ``Sliding(16)`` instead of ``Simultaneous()``. An explicit
                model takes neither these nor ``solve``.

        Returns:
            The tokens. For an implicit model also the iterations of each token, and whether its
            solve converged.

        Raises:
            ValueError: a bad shape, ids outside the vocabulary, a number out of its range,
                ``top_k`` or ``top_p`` without a temperature, a window where it must be 1, or logits
                that are not finite.
            TypeError: an option that the model does not take.

        Example:
            >>> import torch, deqseq as dq
            >>> lm = dq.CausalLM(10, dq.ImplicitModel(dq.Affine(16)))
            >>> lm.generate(
            ...     torch.tensor([[1, 2, 3]]), max_new_tokens=5, temperature=1.0, seed=0
            ... ).tokens.shape
            torch.Size([1, 5])
        """
        stops = tuple(stop_tokens) if isinstance(stop_tokens, Iterable) else (stop_tokens,)
        input_ids = self._token_ids(input_ids)
        for token in stops:
            check_integer("stop_tokens", token, 0, self.embedding.num_embeddings - 1)
        with eval_mode(self):
            return generate(
                self.model,
                self.embed,
                self.logits,
                self.embed(input_ids),
                mask,
                cache,
                Sampler(temperature, top_k, top_p, seed),
                partial(up_to_stop, stops),
                window=window,
                max_new_tokens=max_new_tokens,
                pad_token=pad_token,
                callback=callback,
                solve=solve,
                fields=fields,
            )

    @checked
    def embed(self, input_ids: Tokens) -> Sequence:
        """The input of the model: ``input_ids``, ``(batch, length)``, embedded and scaled.

        Raises:
            TypeError: ids that are not integers, or an embedding that returns something else.
        """
        x = self.embedding(check_integers("input_ids", as_int64(input_ids)))
        wanted = (*input_ids.shape, self.model.d_model)
        if not is_dense(x) or x.shape != wanted:
            raise TypeError(f"CausalLM.embedding must return a Tensor {wanted}, got {shown(x)}")
        return scaled(x, self.embedding_scale)

    @checked
    def logits(self, states: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows vocab"]:
        """The logits of final ``states``, ``(..., d_model)``.

        Raises:
            TypeError, ValueError: the head's weight has another dtype or shape, or it has a bias.
        """
        embedding = self.embedding.weight
        if states.shape[-1:] != embedding.shape[1:]:
            raise ValueError(f"states must be (..., {embedding.shape[1]}), got {shown(states)}")
        weight = embedding if self.head is None else self.head.weight
        if weight.shape != embedding.shape:
            raise ValueError(
                "head.weight must have the shape of the embedding's weight, "
                f"{tuple(embedding.shape)}, got {tuple(weight.shape)}"
            )
        if weight.dtype != states.dtype and not torch.is_autocast_enabled(states.device.type):
            raise TypeError(
                f"head.weight must have the dtype of the states, {states.dtype}, got {weight.dtype}"
            )
        if self.head is not None and self.head.bias is not None:
            raise ValueError("head must have no bias, got one: make it with bias=False")
        if self.head is None:
            return capped(F.linear(states, weight), self.logit_softcap)
        logits, wanted = self.head(states), (*states.shape[:-1], len(weight))
        fits = is_dense(logits) and logits.is_floating_point() and logits.shape == wanted
        if not fits or logits.device != states.device:
            wanted = f"a floating-point Tensor {wanted} on {states.device}"
            raise TypeError(f"CausalLM.head must return {wanted}, got {shown(logits)}")
        return capped(logits, self.logit_softcap)

    def _token_ids(self, input_ids: Tensor) -> Int64[Tensor, "batch length"]:
        input_ids = token_ids("input_ids", input_ids, self.embedding)
        if self.head is None:
            check_loaded(self.embedding, input_ids)
        return input_ids

    def _answers(
        self, ids: Tensor, labels: Tensor | None, targets: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        """What the logits of each token are scored against, checked before anything is solved.

        Labels are moved to the token before theirs; the last token has none.
        """
        if labels is not None and targets is not None:
            raise ValueError(
                "give labels (shifted by one inside) or targets (not shifted), not both"
            )
        name, answers = "labels", labels
        if labels is None:
            name, answers = "targets", targets
        if answers is None:
            return None
        answers = real_answers(name, answers, ids, mask)
        if labels is not None:
            answers = answers[:, 1:]
            if mask is not None:  # the token that predicts a label must be real too
                answers = answers.masked_fill(~mask[:, :-1], IGNORED)
        check_scored(name, answers, self.embedding.num_embeddings)
        return answers


def scaled(x: Sequence, scale: float) -> Sequence:
    """Embedded tokens times ``scale``, which is rounded to their dtype first."""
    return x if scale == 1 else x * x.new_full((), scale)


def capped(logits: Float[Tensor, "*rows vocab"], cap: float | None) -> Float[Tensor, "*rows vocab"]:
    """Logits within ``(-cap, cap)``, or unchanged if ``cap`` is None."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def as_int64(ids: Tensor) -> Tensor:
    """Integers of any dtype as int64; other tensors are refused where they are checked."""
    return ids.long() if ids.dtype in (torch.int32, torch.int16, torch.int8, torch.uint8) else ids


def check_integers(name: str, ids: Tensor) -> Tensor:
    """``ids``, whose values are not looked at; TypeError for what an embedding does not take."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64, got {ids.dtype}: write {name}.long()")
    return ids


def token_ids(name: str, ids: Tensor, embedding: nn.Embedding) -> Int64[Tensor, "batch length"]:
    """``ids`` as int64; an error for a dtype, device or range that the ``embedding`` lacks."""
    ids, device = as_int64(ids), embedding.weight.device
    if ids.device != device and device.type != "meta":  # an offloaded weight is moved by its hooks
        raise ValueError(f"{name} must be on the model's device, {device}, got {ids.device}")
    check_ids(name, ids, embedding.num_embeddings)
    return ids


def real_answers(name: str, answers: Tokens, ids: Tokens, mask: Mask | None) -> Tokens:
    """Labels or targets of ``ids`` as int64, ignored at padding; an error if they do not fit."""
    answers = as_int64(answers)
    check_like(name, answers, ids, "input_ids")
    if mask is None:
        return answers
    check_mask(mask, ids)
    return answers.masked_fill(~mask, IGNORED)


def check_scored(name: str, answers: Tokens, n_classes: int, *, may_be_empty: bool = False) -> None:
    """Refuse labels or targets out of their range, or that leave nothing to score."""
    scored = answers[answers != IGNORED]
    if scored.numel():
        check_ids(f"{name} (but for {IGNORED}, which is ignored)", scored[None], n_classes)
    elif not may_be_empty:
        raise ValueError(
            f"{name} leave nothing to score: all of them are {IGNORED}, or there is no next token"
        )


def cross_entropy(logits: Tensor, answers: Tokens) -> Float[Tensor, ""]:
    """Mean cross entropy in nats, in at least float32."""
    logits = logits.to(float32_at_least(logits))
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten(), ignore_index=IGNORED)
