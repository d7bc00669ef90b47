"""Saved weights: their names and shapes, and how they become those of vLLM's layers."""

import re
from collections.abc import Iterable, Iterator

from safetensors import SafetensorError
from torch import Tensor

from deqseq_vllm.plan import NORMS, Layers, Plan

Shapes = dict[str, tuple[int, ...]]
Named = Iterable[tuple[str, Tensor]]
NORMALISED = ".parametrizations.weight."
"""In the names of weights that are a magnitude, ``original0``, times a direction, ``original1``."""


def checked(weights: Named, plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """Plain weights under the names of the model here, each of them once.

    Args:
        weights: names and tensors as they are saved.
        plan: the model.

    Raises:
        ValueError: while they are iterated: a weight that is missing, twice there, of another
            shape, not finite, or unknown. Names it.
    """
    wanted, found, tied = shapes(plan), set(), plan.spec.tied
    for saved, weight in folded(sound(weights)):
        name, shape = place(saved, plan), tuple(weight.shape)
        if tied and name == "lm_head.weight":
            continue
        if name in found:
            raise ValueError(f"the saved weights have {saved} twice: leave one file in the folder")
        if name not in wanted:
            raise ValueError(
                f"the saved weight {saved} has no place in this model: config.json and the weights "
                "must be of one model"
            )
        if shape != wanted[name]:
            raise ValueError(
                f"the saved weight {saved} must have the shape {wanted[name]} of config.json, got "
                f"{shape}"
            )
        found.add(name)
        yield name, weight
    if missing := [name for name in wanted if name not in found]:
        more = f" and {len(missing) - 9} more" if len(missing) > 9 else ""
        raise ValueError(
            f"the saved weights lack {', '.join(missing[:9])}{more}: save the model again, or copy "
            "all of its files"
        )


def sound(weights: Named) -> Iterator[tuple[str, Tensor]]:
    """The saved weights, as long as they can be read, are floating-point numbers and finite."""
    try:
        for name, weight in weights:
            if not weight.is_floating_point():
                raise ValueError(
                    f"the saved weight {name} must have floating-point numbers, got {weight.dtype}"
                )
            if weight.itemsize > 1 and not bool(weight.isfinite().all()):
                raise ValueError(
                    f"the saved weight {name} must be finite, got NaN or infinity: take an earlier "
                    "checkpoint"
                )
            yield name, weight
    except SafetensorError as error:
        raise ValueError(
            f"the saved weights cannot be read ({error}): copy all of the files again"
        ) from error


def folded(weights: Named) -> Iterator[tuple[str, Tensor]]:
    """Plain weights: where the saved ones are normalised, a magnitude times a direction."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, weight in weights:
        layer, normalised, half = name.partition(NORMALISED)
        if not normalised:
            yield name, weight
            continue
        if half not in ("original0", "original1"):
            raise ValueError(
                f"the saved weight {name} has no place in this model: weight normalisation saves "
                "original0 and original1"
            )
        pair = halves.setdefault(layer, {})
        if half in pair:
            raise ValueError(f"the saved weights have {name} twice: leave one file in the folder")
        pair[half] = weight
        if len(pair) == 2:
            magnitude, direction = pair["original0"], pair["original1"]
            halves[layer] = dict.fromkeys(pair)
            if direction.ndim != 2:
                raise ValueError(
                    f"the saved weight {layer}{NORMALISED}original1 must be a matrix, got the "
                    f"shape {tuple(direction.shape)}"
                )
            if magnitude.shape != (len(direction), 1):
                raise ValueError(
                    f"the saved weight {layer}{NORMALISED}original0 must have one number for each "
                    f"of {len(direction)} rows, got the shape {tuple(magnitude.shape)}"
                )
            yield f"{layer}.weight", direction * (magnitude / direction.norm(dim=1, keepdim=True))
    for layer, pair in halves.items():
        if len(pair) == 1:
            (half,) = {"original0", "original1"} - pair.keys()
            raise ValueError(
                f"the saved weights lack {layer}{NORMALISED}{half}: save the model again, or copy "
                "all of its files"
            )


def place(name: str, plan: Plan) -> str:
    """The name here of a saved weight."""
    match = re.fullmatch(r"model\.core\.(?:(prelude|core|coda)\.)?(?:backbone\.)+(.+)", name)
    if match is None:
        return name.removeprefix("model.")
    part, rest = match[1] or "core", match[2]
    layers = getattr(plan, part)
    if layers is not None and layers.norms == "post":  # OLMo 2 gives its norms names of its own
        rest = rest.replace("post_attention_layernorm.", "input_layernorm_2.")
        rest = rest.replace("post_feedforward_layernorm.", "post_attention_layernorm_2.")
    return f"{part}.{rest}"


def shapes(plan: Plan) -> Shapes:
    """The shape of every plain weight, by its name here."""
    width, vocabulary = plan.core.d_model, plan.spec.vocab_size
    found: Shapes = {"embed_tokens.weight": (vocabulary, width)}
    if not plan.spec.tied:
        found["lm_head.weight"] = (vocabulary, width)
    if plan.spec.injection == "concat":
        found["core.injection.weight"] = (width, 2 * width)
    if plan.spec.injection == "decay":
        found["core.injection.log_rate"] = found["core.injection.step"] = (width,)
        found["core.injection.projection.weight"] = (width, width)
    for name, part in (("prelude", plan.prelude), ("core", plan.core), ("coda", plan.coda)):
        if part is not None:
            found |= {f"{name}.{weight}": shape for weight, shape in _of_stack(part).items()}
    return found


def _of_stack(part: Layers) -> Shapes:
    """The shapes of some layers, of the norm after them and of their own injection."""
    width, queries = part.d_model, part.n_heads * part.headdim
    values = part.n_kv_heads * part.headdim
    layer: Shapes = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (values, width),
        "self_attn.v_proj": (values, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (part.mlp_width, width),
        "mlp.up_proj": (part.mlp_width, width),
        "mlp.down_proj": (width, part.mlp_width),
    }
    has_first, has_second = NORMS[part.norms]
    for norm in ("input_layernorm", "post_attention_layernorm"):
        layer |= {norm: (width,)} if has_first else {}
        layer |= {f"{norm}_2": (width,)} if has_second else {}
    if part.qk_norm is not None:
        whole = part.qk_norm == "all"
        layer["self_attn.q_norm"] = (queries if whole else part.headdim,)
        layer["self_attn.k_norm"] = (values if whole else part.headdim,)
    found: Shapes = {}
    for i in range(part.n_layers):
        found |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        for name in part.biases:
            found[f"layers.{i}.self_attn.{name}_proj.bias"] = layer[f"self_attn.{name}_proj"][:1]
    if part.final_norm:
        found["norm.weight"] = (width,)
    if part.injection:
        found["injection_norm.weight"] = (width,)
        found["injection.weight"] = (queries + 2 * values, width)
        found["injection.bias"] = (queries + 2 * values,)
    return found
