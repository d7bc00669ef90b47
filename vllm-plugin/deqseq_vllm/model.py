"""The model that vLLM runs: prelude, core to its fixed point, coda; and how weights are loaded."""

import re
from collections.abc import Iterable, Iterator
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

from deqseq_vllm.layers import Stack
from deqseq_vllm.plan import Plan, Solve, plan
from deqseq_vllm.report import Report


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
        config: Any = vllm_config.model_config.hf_config
        self.plan, self.scale = plan(config.to_dict()), config.embedding_scale
        check(self.plan, vllm_config)
        numbers = count()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.prelude, self.coda = (
            None if part is None else Stack(part, vllm_config, numbers)
            for part in (self.plan.prelude, self.plan.coda)
        )
        self.core = Stack(
            self.plan.core, vllm_config, numbers, self.plan.steps, self.plan.injection
        )
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        self.logits_processor = LogitsProcessor(config.vocab_size, soft_cap=config.logit_softcap)
        if self.plan.solve is not None and not vllm_config.model_config.enforce_eager:
            self.core.compile(dynamic=True)  # one iteration, not the loop
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
        x = self.scale * inputs_embeds
        if self.prelude is not None:
            x = self.prelude(positions, x)
        z = x if self.plan.start == "input" else torch.zeros_like(x)
        prepared = self.core.prepare(x)
        if self.plan.solve is None:
            for step in range(self.plan.steps):
                z = self.core(positions, z, prepared, step)
        else:
            z = self.solve(self.plan.solve, positions, z, prepared)
        if self.coda is None:
            return z
        if self.plan.norm_before_coda:
            z = self.coda.norm(z)
        return self.coda(positions, z)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        placed = ((self.place(name), weight) for name, weight in folded(weights))
        return AutoWeightsLoader(self).load_weights(placed, mapper=LlamaModel.hf_to_vllm_mapper)

    def solve(self, solve: Solve, positions: Tensor, z: Tensor, prepared: Tensor | None) -> Tensor:
        """Iterate the core until each request has converged; a request that has is frozen.

        A token passes as :class:`deqseq.Stop` says: its change is within the tolerance, and has
        fallen to half of its largest so far or is within the tolerance of its first state. A
        request converges when all of its scheduled tokens pass in one iteration. Each iteration
        writes keys and values to the same slots, so that those of the fixed point remain.
        """
        starts = self.request_starts()
        if starts is None:  # vLLM measures its memory
            return self.core(positions, z, prepared)
        if not solve.has_tolerance:
            value = z
            for _ in range(solve.max_steps):
                value = self.core(positions, z, prepared)
                z = torch.lerp(z, value, solve.damping)
            return value
        tokens = torch.arange(len(z), device=z.device)
        request = torch.searchsorted(starts[1:], tokens, right=True, out_int32=True)
        # of each request, and at the end of the padding
        done = torch.zeros(len(starts), dtype=torch.bool, device=z.device)
        done[-1] = True
        iterations, bound = torch.zeros_like(done, dtype=torch.int64), None
        value = z
        for step in range(1, solve.max_steps + 1):
            value = self.core(positions, z, prepared)
            change, size = (x.float().norm(dim=-1) for x in (value - z, value))
            if bound is None:
                bound = solve.rtol * size
            bound = torch.maximum(bound, change / 2)
            iterations += ~done
            if step % solve.check_every == 0 or step == solve.max_steps:
                passes = change <= solve.atol + torch.minimum(solve.rtol * size, bound)
                failing = torch.zeros_like(iterations).index_add_(0, request, (~passes).long())
                done |= failing == 0
                if bool(done.all()):
                    break
            z = torch.where(done[request, None], z, torch.lerp(z, value, solve.damping))
        if get_tensor_model_parallel_rank() == 0:
            self.report.add(starts, iterations, done)
        return value

    def request_starts(self) -> Tensor | None:
        """Where the tokens of each request begin, and the end; None while memory is measured."""
        metadata: Any = get_forward_context().attn_metadata
        if metadata is None:
            return None
        first_layer: Any = self.core.layers[0]
        return metadata[first_layer.self_attn.attn[0].layer_name].query_start_loc

    def place(self, name: str) -> str:
        """The name here of a saved weight."""
        match = re.fullmatch(r"model\.core\.(?:(prelude|core|coda)\.)?(?:backbone\.)+(.+)", name)
        if match is None:
            return name.removeprefix("model.")
        part, rest = match[1] or "core", match[2]
        if getattr(self.plan, part).norms == "post":  # OLMo 2 gives its norms names of its own
            rest = rest.replace("post_attention_layernorm.", "input_layernorm_2.")
            rest = rest.replace("post_feedforward_layernorm.", "post_attention_layernorm_2.")
        return f"{part}.{rest}"


def check(parts: Plan, engine: VllmConfig) -> None:
    """Refuse ways to run a model that are not served."""
    dtype, eager = engine.model_config.dtype, engine.model_config.enforce_eager
    if parts.core.qk_norm == "all" and get_tensor_model_parallel_world_size() > 1:
        raise ValueError(
            "tensor_parallel_size must be 1, for queries and keys are normalised over all heads"
        )
    if parts.solve is None or not parts.solve.has_tolerance:
        return
    if 0 < parts.solve.rtol < torch.finfo(dtype).eps:
        raise ValueError(
            f"dtype must be float32 for a tolerance of {parts.solve.rtol:g}, which the states of "
            f"{dtype} do not reach: pass --dtype float32, or a fixed number of iterations, "
            '--hf-overrides \'{"eval_solve": {"stop": {"rtol": 0, "max_steps": 8}}}\''
        )
    if not eager and not current_platform.is_cpu():
        raise ValueError(
            "enforce_eager must be True, for a number of iterations that depends on the tokens is "
            "not one graph: pass --enforce-eager"
        )


def folded(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Plain weights: where the saved ones are normalised, a magnitude times a direction."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, weight in weights:
        layer, normalised, part = name.partition(".parametrizations.weight.")
        if not normalised:
            yield name, weight
            continue
        pair = waiting.setdefault(layer, {})
        pair[part] = weight
        if len(pair) == 2:
            magnitude, direction = pair["original0"], waiting.pop(layer)["original1"]
            yield f"{layer}.weight", direction * (magnitude / direction.norm(dim=1, keepdim=True))
