"""How Ouro ends the loops of a token early: a choice among the states of all loops."""

from typing import Annotated

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from deqseq.annotations import Within, checked
from deqseq.check import returned_by


class OuroGate(nn.Module):
    r"""Ouro's choice among the states of its loops, the ``choose`` of a :class:`deqseq.Looped`.

    .. math:: \lambda_s = \sigma(\mathrm{linear}(z_s)), \qquad
              1 - \prod_{j \le s} (1 - \lambda_j) \ge \mathrm{threshold}

    Each token takes the first loop at which the probability of having exited reaches the threshold, or else the last.
    All loops run in any case, as in the authors' code, because later tokens attend to every loop.

    Args:
        linear: maps states ``(..., d_model)`` to a number before the sigmoid, ``(..., 1)``. Its weights are frozen: no
            gradient reaches them through a choice, for which DDP would wait.
        threshold: an attribute that can be changed. At 1 every token takes the last loop.

    References:
        Zhu et al., Scaling Latent Reasoning via Looped Language Models, 2025, arXiv 2510.25741.

    Example:
        >>> gate = OuroGate(nn.Linear(8, 1), threshold=0.8)
        >>> states = torch.randn(4, 2, 5, 8)        # of four loops
        >>> gate(states).shape, gate.loops(states).shape
        (torch.Size([2, 5, 8]), torch.Size([2, 5]))
    """

    @checked
    def __init__(self, linear: nn.Module, threshold: Annotated[float, Within("[0, 1]")] = 1.0) -> None:
        super().__init__()
        self.linear, self.threshold = linear.requires_grad_(False), threshold

    def forward(self, states: Float[Tensor, "loops batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """The state that each token takes, of ``states``, ``(loops, batch, length, d_model)``."""
        place = self.loops(states)[None, ..., None] - 1
        return states.gather(0, place.expand(1, *states.shape[1:]))[0]

    def loops(self, states: Float[Tensor, "loops batch length d_model"]) -> Int64[Tensor, "batch length"]:
        """The loop whose state each token takes, from 1, by ``states``, ``(loops, batch, length, d_model)``."""
        if self.threshold == 1:  # a probability can underflow
            return torch.full(states.shape[1:3], len(states), device=states.device)
        earlier = states[:-1]
        name, what = "OuroGate.linear", "one number of each state"
        logits = returned_by(name, self.linear, earlier, like=earlier[..., :1], what=what)[..., 0]
        stays = torch.sigmoid(-logits.to(torch.promote_types(logits.dtype, torch.float32))).cumprod(dim=0)
        return 1 + (stays > 1 - self.threshold).long().cumprod(dim=0).sum(dim=0)
