"""Small backbones whose maps contract, in float64."""

import torch

import deqseq as dq

MAMBA2 = {"d_model": 8, "n_layers": 2, "d_state": 4, "headdim": 4, "chunk_size": 3}
LLAMA = {"d_model": 8, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "mlp_width": 12}


def contractive_mamba2(*, weight_norm: bool = True, **changes) -> dq.Mamba2:
    """A random Mamba2 in which the injection outweighs the state: iteration converges fast."""
    torch.manual_seed(0)
    config = dq.Mamba2Config(**MAMBA2 | changes, weight_norm=False)
    backbone = dq.Mamba2(config).double()
    for block in backbone.layers:
        block.mixer.in_proj.weight.data *= 0.1
        block.mixer.out_proj.weight.data *= 4
    if weight_norm:
        dq.layers.apply_weight_norm(backbone)
    return backbone


def contractive_llama(*, weight_norm: bool = True, **changes) -> dq.Llama:
    """A random Llama, likewise; key-value heads are shared by two."""
    torch.manual_seed(0)
    config = dq.LlamaConfig(**LLAMA | changes, weight_norm=False)
    backbone = dq.Llama(config).double()
    for block in backbone.layers:
        attention = block.self_attn
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj, block.mlp.gate_proj):
            layer.weight.data *= 0.2
        attention.o_proj.weight.data *= 12
    if weight_norm:
        dq.layers.apply_weight_norm(backbone)
    return backbone


def llama(**changes) -> dq.Llama:
    """A random Llama: at few iterations it is far from its fixed point."""
    torch.manual_seed(0)
    return dq.Llama(dq.LlamaConfig(**LLAMA | {"mlp_width": 6} | changes)).double()


class Pointwise(dq.Backbone):
    """Each token on its own, without a cache."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.d_model = 8
        self.inner = torch.nn.Linear(8, 8).double()

    def prepare(self, x, cache=None, mask=None):
        return x

    def forward(self, z, inputs, cache=None, *, need_aux=False):
        return torch.tanh(self.inner(z) / 4 + inputs), None


def injected_llama() -> dq.Injected:
    """Layers without an injection of their own."""
    return dq.Injected(contractive_llama(n_layers=1, injection=False), dq.AddInjection()).double()


def recurrent_depth(core: dq.ImplicitModel | dq.ExplicitModel, norm=None) -> dq.RecurrentDepth:
    """A core between two Llamas of one layer."""
    first, last = (
        dq.ExplicitModel(contractive_llama(n_layers=1, injection=False)) for _ in range(2)
    )
    return dq.RecurrentDepth(first, core, last, norm).double()


def affine() -> dq.Affine:
    """The toy with a known answer."""
    torch.manual_seed(0)
    return dq.Affine(8).double()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers of a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def embedded(batch: int = 2, length: int = 7, dim: int = 8) -> torch.Tensor:
    """Random inputs."""
    return randn(batch, length, dim)


def language_model(backbone: dq.Backbone, vocab_size: int = 11, **fields) -> dq.CausalLM:
    """Embeddings of the size of the states, so that predictions differ; fields say how to solve."""
    torch.manual_seed(1)
    model = dq.ImplicitModel(backbone, dq.SolveConfig(**fields))
    return dq.CausalLM(vocab_size, model, embedding_std=1.0).double()


class Logits(torch.nn.Module):
    """A language model whose output torch.export knows: a tensor."""

    def __init__(self, lm: dq.CausalLM) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm(ids).logits
