"""Tokens in, predictions out."""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from deqseq.backbones.base import Cache, RealTokens
from deqseq.models.explicit import ExplicitModel
from deqseq.models.implicit import ImplicitModel
from deqseq.models.output import CausalLMOutput
from deqseq.models.padding import check_mask

Tokens = Int64[Tensor, "batch length"]
IGNORED = -100


class CausalLM(nn.Module):
    """An embedding, a model, and a head without bias.

    Args:
        vocab_size: tokens, at least 1.
        model: an :class:`ImplicitModel` or :class:`ExplicitModel`.
        embedding_std: standard deviation of the initial embedding.
        tied: whether the head is the embedding, as in the paper, or has weights of its own.

    Raises:
        ValueError: a vocabulary below 1.

    Example:
        >>> import deqseq as dq
        >>> backbone = dq.Mamba2(dq.Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> lm = dq.CausalLM(10, dq.ImplicitModel(backbone))
        >>> output = lm(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]]))
        >>> output.logits.shape, output.loss.ndim
        (torch.Size([1, 3, 10]), 0)
    """

    def __init__(
        self,
        vocab_size: int,
        model: ImplicitModel | ExplicitModel,
        embedding_std: float = 0.02,
        *,
        tied: bool = True,
    ) -> None:
        super().__init__()
        if vocab_size < 1:
            raise ValueError(f"CausalLM.vocab_size must be >= 1, got {vocab_size}")
        self.embedding = nn.Embedding(vocab_size, model.backbone.d_model)
        nn.init.normal_(self.embedding.weight, std=embedding_std)
        self.model = model
        self.head = None if tied else nn.Linear(model.backbone.d_model, vocab_size, bias=False)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=embedding_std)

    def forward(
        self,
        input_ids: Tokens,
        *,
        labels: Tokens | None = None,
        targets: Tokens | None = None,
        mask: RealTokens | None = None,
        cache: Cache | None = None,
        return_cache: bool = False,
        **solve_options: Any,
    ) -> CausalLMOutput:
        """Predict a token at every position.

        Args:
            input_ids: ``(batch, length)``.
            labels: the sequence itself, for next-token prediction: the one at ``t`` is the answer at ``t - 1``.
            targets: the answer at each position, as in state tracking: the one at ``t`` belongs to the input at
                ``t``. In both, -100 and what concerns padding is left out of the loss.
            mask: which tokens are real, ``(batch, length)``; padding may stand on either side of a row. None: all.
            cache: what :class:`CausalLMOutput` returned for the tokens before.
            return_cache: whether the cache after these tokens is wanted.
            **solve_options: ``sweep``, ``solver``, ``stop``, ``trace``, ``callback`` of an
                :class:`ImplicitModel`'s call; an explicit model takes none.

        Returns:
            Logits, the loss if there is something to compare with, cache and statistics.

        Raises:
            ValueError: a bad shape, ids outside the vocabulary, both labels and targets, or none to score.
            TypeError: an option that the model does not take.
        """
        _check_ids("input_ids", input_ids, self.embedding.num_embeddings)
        answers = self._answers(input_ids, labels, targets, mask)
        output = self.model(
            self.embedding(input_ids), mask=mask, cache=cache, return_cache=return_cache, **solve_options
        )
        logits = F.linear(output.value, self.embedding.weight if self.head is None else self.head.weight)
        loss = None if answers is None else _cross_entropy(logits, answers, shift=labels is not None)
        return CausalLMOutput(logits, loss, output.cache, output.stats, output.status)

    def compile(self, **options: Any) -> None:
        """Compile the blocks of the model with ``torch.compile``; what is around them stays as it is.

        Args:
            **options: of ``torch.compile``.
        """
        self.model.compile(**options)

    def _answers(
        self, ids: Tensor, labels: Tensor | None, targets: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        """What to compare with, checked before anything is solved."""
        if labels is not None and targets is not None:
            raise ValueError("give labels (shifted by one inside) or targets (not shifted), not both")
        answers, name = (targets, "targets") if labels is None else (labels, "labels")
        if answers is None:
            return None
        if answers.shape != ids.shape:
            raise ValueError(f"{name} must have the shape of input_ids {tuple(ids.shape)}, got {tuple(answers.shape)}")
        if mask is not None:
            check_mask(mask, ids)
            known = mask if labels is None else mask & F.pad(mask[:, :-1], (1, 0))  # a label is told by the one before
            answers = answers.masked_fill(~known, IGNORED)
        scored = answers[:, 1:] if labels is not None else answers
        scored = scored[scored != IGNORED]
        if scored.numel() == 0:
            raise ValueError(f"{name} leave nothing to score: all of them are {IGNORED}, or there is no next token")
        _check_ids(name, scored[None], self.embedding.num_embeddings)
        return answers


def _check_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    if ids.ndim != 2 or 0 in ids.shape or ids.dtype != torch.int64:
        raise ValueError(
            f"{name} must be int64 of shape (batch, length), none of them 0, got {ids.dtype} {tuple(ids.shape)}"
        )
    low, high = torch.stack(torch.aminmax(ids)).tolist()  # one transfer
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} must lie in 0..{vocab_size - 1}, got {low}..{high}")


def _cross_entropy(logits: Tensor, answers: Tokens, *, shift: bool) -> Float[Tensor, ""]:
    """Mean cross entropy in nats, in float32 at least; shifted, a position is scored by the token after it."""
    if shift:
        logits, answers = logits[:, :-1], answers[:, 1:]
    wide = rearrange(logits, "batch length vocab -> (batch length) vocab")
    wide = wide.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, rearrange(answers, "batch length -> (batch length)"), ignore_index=IGNORED)
