"""Your own block as a recurrent model: ``python examples/own_block.py``, half a minute.

A gated cell learns from 16 bits whether the ones so far are odd; it is asked for 256.
"""

from dataclasses import dataclass

import torch

import deqseq as dq


@dataclass(frozen=True)
class Last(dq.Cache):
    """What later tokens need of the earlier ones: the last state, ``(batch, width)``."""

    state: torch.Tensor


class GatedCell(dq.Backbone[Last]):
    """A gate mixes the state before with a new one; unlike a GRU's, both read the state."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model, self.enter = d_model, torch.nn.Linear(d_model, 2 * d_model)
        self.mix = torch.nn.Linear(2 * d_model, 2 * d_model, bias=False)

    def prepare(self, x, cache=None, mask=None):
        """What stays the same in every iteration."""
        return self.enter(x)

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        """One iteration of all states ``z``, ``(batch, length, width)``."""
        first = torch.zeros_like(z[:, 0]) if cache is None else cache.state
        states = torch.cat([first[:, None], z], dim=1)
        gate, new = (self.mix(torch.cat([states[:, :-1], z], 2)) + inputs).chunk(2, dim=2)
        return states[:, :-1].lerp(new.tanh(), gate.sigmoid()), states if need_aux else None

    def advance(self, cache, aux, tokens, counts=None):
        """The cache after ``tokens`` tokens, or ``counts[i]`` of row i, to generate."""
        rows = torch.arange(len(aux), device=aux.device)
        return Last(aux[rows, tokens if counts is None else counts].detach())


if __name__ == "__main__":
    torch.manual_seed(0)
    lm = dq.CausalLM(2, dq.ImplicitModel(GatedCell(32)), embedding_std=1.0)
    optimizer = torch.optim.Adam(lm.parameters(), lr=3e-3)
    for step in range(1, 301):
        output = lm(bits := torch.randint(2, (64, 16)), targets=bits.cumsum(1) % 2)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}, loss {output.loss:.4f}, {output}")
    bits, stop = torch.randint(2, (8, 256)), dq.Stop(rtol=0.01, max_steps=1000)
    for sweep in (dq.Simultaneous(), dq.Sequential()):
        output = lm.eval()(bits, sweep=sweep, stop=stop)
        right = (output.logits.argmax(-1) == bits.cumsum(1) % 2).float().mean()
        print(f"{sweep}: {right:.0%} right, {output}")
