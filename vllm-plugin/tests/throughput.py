"""Tokens per second and cache per token of a looped Llama in vLLM, beside alternatives.

``throughput.py FOLDER PYTHON --json PATH``: the folder of ``make_models.py``, and the Python where
deqseq is installed. The fixed point (tolerance 1e-3) is compared with the same layers run once
(vLLM's own Llama), with as many loops as the fixed point takes, each with a slot of its own, and
with deqseq's ``generate``. All take turns, on the same prompts.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import vllm
from compare import engine
from harness import Row, command_line, paired_row, report, take_turns, value_row

REQUESTS, NEW, GIBIBYTE = (1, 8, 32), 64, 2**30
LAYERS, CORE, ENTRY = 12, 4, 2 * 4 * 64 * 4
"""Layers, those that are iterated, and bytes of a token's keys and values in one of them."""
PEERS = {"once": "unlooped", "loops": "slot per loop", "deqseq": "deqseq's generate"}


def rows(folder: Path, python: str, quick: bool) -> Iterator[Row]:
    """All comparisons."""
    names = ("fixed", "once", "loops")
    engines = {
        name: engine(folder / f"speed-{name}", max_model_len=512, max_num_seqs=32) for name in names
    }
    case = f"Llama of {LAYERS} layers, {CORE} iterated; vLLM {vllm.__version__}"
    tokens = {name: tokens_per_gibibyte(llm) for name, llm in engines.items()}
    slots = {
        name: (GIBIBYTE / number / ENTRY - (LAYERS - CORE)) / CORE
        for name, number in tokens.items()
    }
    # rounded, because the cache is of whole blocks
    counts = (round(slots["fixed"]), PEERS["loops"], round(slots["loops"]))
    yield value_row(case, "cache entries / token and layer", *counts)
    yield value_row(case, "tokens / GiB of cache", tokens["fixed"], PEERS["loops"], tokens["loops"])
    prompts = json.loads((folder / "speed-fixed" / "prompts.json").read_text())
    command = [python, str(Path(__file__).with_name("generate.py")), str(folder / "speed-fixed")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as generate:
        for count in REQUESTS:
            works = {name: served(llm, prompts[:count]) for name, llm in engines.items()}
            times = take_turns(works | {"deqseq": generated(generate, count)}, 1 if quick else 5)
            speeds = {
                name: [count * NEW / one for one in seconds] for name, seconds in times.items()
            }
            for name, peer in PEERS.items():
                label = f"{case}, {count} requests"
                yield paired_row(
                    label, speeds["fixed"], peer, speeds[name], metric="tokens / s", scale=1
                )


def served(llm: vllm.LLM, prompts: list[list[int]]) -> Callable[[], object]:
    """What continues the prompts in vLLM, all at once."""
    params = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    return lambda: llm.generate(given, params, use_tqdm=False)


def generated(process: Any, count: int) -> Callable[[], object]:
    """What continues as many of the prompts in ``generate.py``."""

    def ask() -> None:
        print(count, NEW, file=process.stdin, flush=True)
        assert int(process.stdout.readline()) == count * NEW

    return ask


def tokens_per_gibibyte(llm: vllm.LLM) -> int:
    """By vLLM's own count of the blocks that its cache has."""
    cache = llm.llm_engine.vllm_config.cache_config
    return cache.num_gpu_blocks * cache.block_size * GIBIBYTE // cache.kv_cache_memory_bytes


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("python")
    options = parser.parse_args()
    report(rows(options.folder, options.python, options.quick), options)
