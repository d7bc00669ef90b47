"""Classifies every token (puzzles, tagging), by a causal model or one in both directions."""

from typing import Any, Unpack

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from deqseq.arguments import NonNegativeFloat, PositiveInt, checked
from deqseq.config import SolveConfig, SolveFields
from deqseq.models.base import Model
from deqseq.models.causal_lm import (
    TokenModel,
    Tokens,
    check_integers,
    check_scored,
    cross_entropy,
    real_answers,
    token_ids,
)
from deqseq.models.output import TokenClassifierOutput
from deqseq.step import Callback
from deqseq.types import Mask, Sequence

Positions = Int64[Tensor, "length kinds"]
"""Coordinates of the tokens: a column per kind (line, column, box, say), a row per token."""


class TokenClassifier(TokenModel):
    r"""An embedding, a model, and a linear head that gives every token a class.

    .. math:: x_t = E_{i_t} + \sum_k P^{(k)}_{p_{tk}}, \qquad y_t = W z^*_t + b

    Unlike a :class:`CausalLM` it also takes bidirectional models, such as those of
    ``LlamaConfig(causal=False)``, whose tokens attend to all others. It cannot generate. If the
    state is wider than ``d_model``, the head reads its first ``d_model`` channels.

    Args:
        vocab_size: number of different tokens.
        n_classes: number of classes.
        model: an :class:`ImplicitModel`, :class:`ExplicitModel` or :class:`RecurrentDepth`.
        positions: coordinates of the tokens of a row, int64, ``(length, kinds)``, from 0, such as
            line, column and box of each cell of a Sudoku. Each coordinate of each kind has its own
            vector, which is added to the token's. All inputs then have this length; a mask hides
            tokens without moving the others. Default: none.
        embedding_std: standard deviation of the initial embeddings of tokens and positions.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range.

    Example:
        >>> import torch, deqseq as dq
        >>> config = dq.LlamaConfig(d_model=16, n_heads=2, causal=False)
        >>> cells = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        >>> model = dq.TokenClassifier(4, 2, dq.ImplicitModel(dq.Llama(config)), positions=cells)
        >>> ids = torch.randint(4, (5, 9))
        >>> output = model(ids, targets=ids % 2)
        >>> output.logits.shape, output.loss.ndim
        (torch.Size([5, 9, 2]), 0)
    """

    position_ids: Tensor | None

    @checked
    def __init__(
        self,
        vocab_size: PositiveInt,
        n_classes: PositiveInt,
        model: Model,
        *,
        positions: Positions | None = None,
        embedding_std: NonNegativeFloat = 1.0,
    ) -> None:
        super().__init__()
        self.n_classes, self.model = n_classes, model
        self.embedding = nn.Embedding(vocab_size, model.d_model)
        nn.init.normal_(self.embedding.weight, std=embedding_std)
        self.position_embedding = None
        if positions is not None:
            _check_positions(positions)
            sizes = positions.amax(dim=0) + 1
            positions = positions + sizes.cumsum(0) - sizes
            self.position_embedding = nn.Embedding(int(sizes.sum()), model.d_model)
            nn.init.normal_(self.position_embedding.weight, std=embedding_std)
            positions = positions.to(self.embedding.weight.device)
        self.register_buffer("position_ids", positions)
        self.head = nn.Linear(model.d_model, n_classes)

    @checked
    def forward(
        self,
        input_ids: Tokens,
        *,
        targets: Tokens | None = None,
        mask: Mask | None = None,
        callback: Callback | None = None,
        throw: bool = False,
        solve: SolveConfig | None = None,
        **fields: Unpack[SolveFields],
    ) -> TokenClassifierOutput:
        """Predict the class of every token.

        Args:
            input_ids: token ids, 0 to ``vocab_size - 1``, ``(batch, length)``.
            targets: classes, ``(batch, length)``; -100 (such as at the givens of a puzzle) and
                padding are left out of the loss.
            mask: bool, True at real tokens, ``(batch, length)``; padding may be anywhere in a row.
                Default: no padding.
            callback: called at every check, as in :meth:`deqseq.ImplicitModel.forward`.
            throw: whether rows that spent their budget or diverged raise an error.
            solve: replaces the model's :class:`SolveConfig` for this call.
            **fields: fields of :class:`SolveConfig` to replace for this call; ``start`` may also be
                the states to begin from, such as ``output.states.detach()`` of an
                :class:`ImplicitModel`'s other call. An explicit model takes neither these nor
                ``callback``, ``throw`` and ``solve``.

        Returns:
            Logits, states, the loss if targets were given, and statistics.

        Raises:
            ValueError: a bad shape, ids or targets out of their range, or nothing to score.
            TypeError: an option that the model does not take.
            ConvergenceError: with ``throw``, as in :meth:`deqseq.ImplicitModel.forward`.
            NotImplementedError: a sweep other than :class:`Simultaneous`, of a model that is not
                causal.
        """
        input_ids = token_ids("input_ids", input_ids, self.embedding)
        if self.position_ids is not None and len(self.position_ids) != input_ids.shape[1]:
            raise ValueError(
                f"input_ids must have the length of positions, {len(self.position_ids)}, got "
                f"{input_ids.shape[1]}"
            )
        if targets is not None:
            targets = real_answers("targets", targets, input_ids, mask)
            check_scored("targets", targets, self.n_classes)
        options: dict[str, Any] = {"callback": callback, "throw": throw, "solve": solve, **fields}
        output = self.model(self.embed(input_ids), mask=mask, **options)
        logits = self.head(output.value[..., : self.model.d_model])
        loss = None if targets is None else cross_entropy(logits, targets)
        return TokenClassifierOutput(
            logits, output.value, loss, output.stats, output.status, output.call
        )

    @checked
    def embed(self, input_ids: Tokens) -> Sequence:
        """The input of the model: ``input_ids``, ``(batch, length)``, embedded, with positions."""
        x = self.embedding(check_integers("input_ids", input_ids))
        if self.position_embedding is None:
            return x
        return x + self.position_embedding(self.position_ids).sum(dim=1)


def _check_positions(positions: Tensor) -> None:
    """Refuse positions that are not whole numbers from 0, in one row per token."""
    fits = positions.ndim == 2 and positions.dtype == torch.int64 and 0 not in positions.shape
    if positions.is_meta:
        raise ValueError("positions must be numbers, not on the device meta")
    if not fits or bool((positions < 0).any()):
        raise ValueError(
            "positions must be int64 of shape (length, kinds), at least 0, got "
            f"{positions.dtype} {tuple(positions.shape)}"
            + (f" with {int(positions.min())}" if fits else "")
        )
