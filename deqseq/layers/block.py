"""A pre-norm residual block around the Mamba2 mixer."""

from jaxtyping import Float
from torch import Tensor, nn

from deqseq.layers.mamba2_mixer import Mamba2Mixer, MixerState
from deqseq.layers.mlp import SwiGLU
from deqseq.layers.rms_norm import RMSNorm


class Mamba2Block(nn.Module):
    r"""Mixer and, if wanted, feed-forward layer, each after a norm and beside a residual path.

    .. math:: z \leftarrow z + m \odot \mathrm{mixer}(\mathrm{norm}(z), \text{injection}), \qquad
              z \leftarrow z + \mathrm{mlp}(\mathrm{norm}(z))

    Args:
        mixer: the sequence mixer.
        d_model: width.
        mlp_width: hidden width of the feed-forward layer; 0 leaves it out.
        norm_eps: epsilon of the norms.

    Example:
        >>> import torch
        >>> block = Mamba2Block(Mamba2Mixer(8, d_state=4, headdim=4), 8)
        >>> block(torch.zeros(2, 5, 8))[0].shape
        torch.Size([2, 5, 8])
    """

    def __init__(self, mixer: Mamba2Mixer, d_model: int, mlp_width: int = 0, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = RMSNorm(d_model, norm_eps)
        self.mixer = mixer
        self.post_norm = RMSNorm(d_model, norm_eps) if mlp_width else None
        self.mlp = SwiGLU(d_model, mlp_width) if mlp_width else None

    def forward(
        self,
        z: Float[Tensor, "batch length d_model"],
        injection: Float[Tensor, "batch length injected"] | None = None,
        state: MixerState | None = None,
        mask: Float[Tensor, "batch length d_model"] | None = None,
        return_state: bool = False,
    ) -> tuple[Float[Tensor, "batch length d_model"], MixerState | None]:
        """Run the block.

        Args:
            z: the state of the iteration, ``(batch, length, d_model)``.
            injection: for the mixer, ``(batch, length, injected_width)``; None: nothing.
            state: what the mixer remembers; None: nothing came before.
            mask: dropout mask of the mixer's output, of the shape of ``z``; None: nothing is dropped.
            return_state: whether the mixer's state after these tokens is wanted.

        Returns:
            The new ``z``, and the mixer's new state (None if it was not asked for).
        """
        mixed, state = self.mixer(self.norm(z), injection, state, return_state)
        z = z + (mixed if mask is None else mixed * mask)
        if self.mlp is not None and self.post_norm is not None:
            z = z + self.mlp(self.post_norm(z))
        return z, state
