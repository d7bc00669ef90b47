"""The model that vLLM runs: prelude, core to its fixed point, coda; and how weights are loaded."""

from collections.abc import Iterable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.llama import LlamaModel
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.platforms import current_platform

from deqseq import SolveConfig, take
from deqseq_vllm.iterate import iterate
from deqseq_vllm.layers import Stack
from deqseq_vllm.plan import Plan, plan
from deqseq_vllm.report import Report
from deqseq_vllm.requests import Requests
from deqseq_vllm.weights import checked


class DeqseqForCausalLM(nn.Module):
    """A language model that deqseq has saved.

    Args:
        vllm_config: of the engine; its ``hf_config`` is what ``save_pretrained`` wrote.
        prefix: of vLLM; not used.

    Raises:
        ValueError: a model, or a way to solve or run it, that is not served.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.plan = plan(vllm_config.model_config.hf_config.to_dict())
        check(self.plan, vllm_config)
        spec, width, numbers = self.plan.spec, self.plan.core.d_model, count()
        self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, width)
        self.prelude, self.coda = (
            None if part is None else Stack(part, vllm_config, numbers)
            for part in (self.plan.prelude, self.plan.coda)
        )
        self.core = Stack(self.plan.core, vllm_config, numbers, self.plan.steps, spec.injection)
        self.lm_head = self.embed_tokens
        if not spec.tied:
            self.lm_head = ParallelLMHead(spec.vocab_size, width)
        self.logits_processor = LogitsProcessor(spec.vocab_size, soft_cap=spec.logit_softcap)
        eager = vllm_config.model_config.enforce_eager
        self.in_graphs = not eager and not current_platform.is_cpu()
        # of the core one iteration, not the loop; one with a slot for each step has many graphs
        core = self.core if self.plan.steps == 1 else None
        for part in (self.prelude, core, self.coda):
            if part is not None and not eager:
                part.compile(dynamic=True)
        self.report = Report()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        x = self.plan.spec.embedding_scale * inputs_embeds
        # a view of vLLM's buffer, which was made outside inference mode, needs graphs of its own
        positions = positions.clone()
        if get_forward_context().attn_metadata is None:  # vLLM measures memory, before it serves
            self.run(positions[:1], x[:1])  # compiles the layers for one token, and then for many
        return self.run(positions, x)

    def run(self, positions: Tensor, x: Tensor) -> Tensor:
        """The states before the head, of embedded tokens ``x``, ``(tokens, width)``."""
        if self.prelude is not None:
            x = self.prelude(positions, x)
        z = x if self.plan.start == "input" else torch.zeros_like(x)
        prepared = self.core.prepare(x)
        if self.plan.solve is not None:
            z = self.solve(self.plan.solve, positions, z, prepared)
        else:
            for step in range(self.plan.steps):
                z = self.core(positions, z, prepared, step)
        if self.coda is None:
            return z
        if self.plan.spec.norm == "coda":
            z = self.coda.norm(z)
        return self.coda(positions, z)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the saved weights; ValueError names one that is missing or does not fit."""
        mapper = LlamaModel.hf_to_vllm_mapper
        return AutoWeightsLoader(self).load_weights(checked(weights, self.plan), mapper=mapper)

    def solve(
        self, config: SolveConfig, positions: Tensor, z: Tensor, prepared: Tensor | None
    ) -> Tensor:
        """The fixed points of the requests, or their values after a fixed number of iterations.

        Each iteration writes keys and values to the same slots, so that those of the last one
        remain.
        """
        if get_forward_context().attn_metadata is None:
            return self.core(positions, z, prepared)
        if self.in_graphs and not config.stop.has_tolerance:
            value = z
            for _ in range(config.stop.max_steps):
                value = self.core(positions, z, prepared)
                z = config.solver.step(z, value, None)[0]
            return value

        def f(z: Tensor) -> Tensor:
            return self.core(positions, z, prepared)

        def keep(requests: Tensor, tokens: Tensor) -> None:
            nonlocal positions, prepared
            positions, prepared = take((positions, prepared), tokens)
            batch.keep(requests, tokens)

        layers: Any = self.core.layers
        with Requests([layer.self_attn.attn[0].layer_name for layer in layers]) as batch:
            lengths = batch.lengths
            solved = iterate(f, z, lengths, config, keep)
        if get_tensor_model_parallel_rank() == 0:
            self.report.add(lengths, solved, config.stop.has_tolerance)
        return solved.value


def check(parts: Plan, engine: VllmConfig) -> None:
    """Refuse ways to run a model that are not served."""
    dtype, eager = engine.model_config.dtype, engine.model_config.enforce_eager
    if parts.core.qk_norm == "all" and get_tensor_model_parallel_world_size() > 1:
        raise ValueError(
            "tensor_parallel_size must be 1, for queries and keys are normalised over all heads"
        )
    if parts.solve is None or not parts.solve.stop.has_tolerance:
        return
    rtol = parts.solve.stop.rtol
    if 0 < rtol < torch.finfo(dtype).eps:
        raise ValueError(
            f"dtype must be float32 for a tolerance of {rtol:g}, which the states of "
            f"{dtype} do not reach: pass --dtype float32, or a fixed number of iterations, "
            '--hf-overrides \'{"eval_solve": {"stop": {"rtol": 0, "max_steps": 8}}}\''
        )
    if not eager and not current_platform.is_cpu():
        raise ValueError(
            "enforce_eager must be True, for a number of iterations that depends on the tokens is "
            "not one graph: pass --enforce-eager"
        )
