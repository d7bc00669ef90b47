"""How generation solves, as a generation configuration says it: the dial of test-time compute."""

from dataclasses import replace
from typing import Any

from transformers import GenerationConfig

from deqseq.integrations.huggingface.names import check_known
from deqseq.integrations.huggingface.objects import Kind, from_json, to_json
from deqseq.stop import Stop
from deqseq.sweeps import Simultaneous, Sliding

FIELDS: dict[str, Kind] = {"deq_sweep": "sweep", "deq_solver": "solver", "deq_stop": "stop"}
"""The fields of a generation configuration that are ours: JSON, so that ``generation_config.json`` holds them. Of
``deq_stop`` what is not named stays as in the model."""


def solve_options(config: GenerationConfig, stop: Stop | None, given: dict[str, Any]) -> dict[str, Any]:
    """What a model's call is to be given while it generates.

    Args:
        config: a generation configuration, which may have our fields.
        stop: the model's own stopping rule; None: the model is explicit.
        given: ``sweep``, ``solver`` and ``stop`` of the call itself, as objects; None where there is none.

    Returns:
        ``sweep``, ``solver`` and ``stop``, as far as they are chosen. The default for prompts is ``Sliding()``, or all
        tokens together where the stopping rule does not tell tokens apart.

    Raises:
        ValueError: an unknown field, name or number, a choice for an explicit model, or the same choice twice.
        TypeError: an object where a configuration must hold JSON.

    Example:
        >>> config = GenerationConfig(deq_sweep={"name": "Sliding", "window": 4}, deq_stop={"max_steps": 8})
        >>> options = solve_options(config, Stop(rtol=1e-4), {})
        >>> options["sweep"], options["stop"].rtol, options["stop"].max_steps
        (Sliding(window=4), 0.0001, 8)
    """
    check_fields(config)
    chosen = {name: value for name in FIELDS if (value := getattr(config, name, None)) is not None}
    objects = {name: value for name, value in given.items() if value is not None}
    if stop is None:
        if chosen or objects:
            raise ValueError(
                f"an explicit model (implicit=False) solves nothing: leave out {', '.join([*chosen, *objects])}"
            )
        return {}
    for field, value in chosen.items():
        name = field.removeprefix("deq_")
        if name in objects:
            raise ValueError(f"{name} is given twice: as {field} in the generation configuration and in the call")
        objects[name] = from_json(FIELDS[field], value, field)
    if "deq_stop" in chosen:
        objects["stop"] = replace(stop, **_named(chosen["deq_stop"]))
    if "sweep" not in objects:
        apart = objects.get("stop", stop).norm == "max_token"
        objects["sweep"] = Sliding() if apart else Simultaneous()
    return objects


def check_fields(config: GenerationConfig) -> None:
    """Refuse a generation configuration whose own fields of ours are misspelt or hold what is no JSON.

    Raises:
        ValueError: an unknown field, name or number.
        TypeError: an object where a configuration must hold JSON.
    """
    for name, value in vars(config).items():
        if name.startswith("deq"):
            check_known("generation configuration: field", name, FIELDS)
        if name in FIELDS and value is not None:
            parsed = from_json(FIELDS[name], value, name)
            if parsed is value:  # transformers would write null for it
                raise TypeError(f"{name} of a generation configuration must be JSON, as {to_json(parsed)}, got {value}")


def _named(stop: Any) -> dict[str, Any]:
    """The fields of a stopping rule that JSON names."""
    return {field: value for field, value in stop.items() if field != "name"}
