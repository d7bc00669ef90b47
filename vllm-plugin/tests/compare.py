"""Compare vLLM's tokens with deqseq's: ``compare.py FOLDER``, the folder of ``make_models.py``.

A difference is allowed where two tokens are equally probable to 1e-3; anything else fails.
"""

import gc
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deqseq_vllm.layers import Stack
from prometheus_client import REGISTRY
from safetensors.torch import load_file, save_file
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from vllm import LLM, SamplingParams

Rows = Sequence[dict[str, Any]]
EXACTLY = {"eval_solve": {"stop": {"rtol": 0, "max_steps": 8}}}
WHOLE = {"max_num_batched_tokens": 8192, "enable_prefix_caching": False}
SMALL_CACHE = {"num_gpu_blocks_override": 24, "block_size": 32, "disable_log_stats": False}
CLOSELY = ("implicit", "llama-concat", "llama-looped")
"""Models that are compared in all ways."""
REFUSED = (
    ("refused-mamba2", "backbone must be", {}),
    ("refused-solver", "solve.solver must be", {}),
    ("implicit", "dtype must be float32", {"dtype": "bfloat16"}),
    ("implicit", "'max_steps'", {"hf_overrides": {"eval_solve": {"stop": {"max_step": 8}}}}),
    ("implicit", "Stop.rtol must be", {"hf_overrides": {"eval_solve": {"stop": {"rtol": -1}}}}),
    ("implicit", "belongs in eval_solve.stop", {"hf_overrides": {"rtol": 1e-2}}),
    ("implicit", "belongs in eval_solve", {"hf_overrides": {"stop": {"rtol": 1e-2}}}),
    ("implicit", "LanguageModelSpec.steps", {"hf_overrides": {"steps": "3"}}),
)
DAMAGED = "mlp.down_proj.parametrizations.weight.original1"
FAILING = {2: "5 not converged, 5 diverged", 3: "5 not converged, 0 diverged"}
"""What the log says of a prompt of 5 tokens one of which is this one; see make_models.failing."""


def engine(folder: Path, **options: Any) -> LLM:
    """A small engine in this process."""
    gc.collect()  # the one before
    usual = {
        "max_model_len": 256,
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
    }
    return LLM(model=str(folder), kv_cache_memory_bytes=2**28, **usual | options)


def generated(llm: LLM, rows: Rows) -> list[Any]:
    """What vLLM generates for all prompts at once."""
    new = len(rows[0]["tokens"])
    params = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, logprobs=1, detokenize=False
    )
    return llm.generate(
        [{"prompt_token_ids": row["prompt"]} for row in rows], params, use_tqdm=False
    )


def compare(name: str, outputs: list[Any], rows: Rows) -> int:
    """How many prompts got other tokens."""
    different, largest = 0, 0.0
    for output, row in zip(outputs, rows, strict=True):
        made = output.outputs[0]
        if list(made.token_ids) != row["tokens"]:
            different += row["gap"] > 1e-3
            print(
                f"  {name}: prompt of {len(row['prompt'])} tokens differs, smallest gap "
                f"{row['gap']:.1e}"
            )
        elif row["logprobs"] is not None:
            ours = [next(iter(one.values())).logprob for one in made.logprobs]
            largest = max(
                largest, *(abs(a - b) for a, b in zip(ours, row["logprobs"], strict=True))
            )
    print(
        f"{name}: {len(rows) - different} of {len(rows)} equal, log probabilities to {largest:.1e}",
        flush=True,
    )
    return different


def in_all_ways(folder: Path, rows: Rows) -> int:
    """How many prompts differ with chunks, cached prefixes, a small cache, and two processes."""
    name, different = folder.name, 0
    llm = engine(folder, max_num_batched_tokens=16, max_num_seqs=16, enable_prefix_caching=False)
    different += compare(f"{name}, prefill in chunks of 16", generated(llm, rows), rows)
    del llm
    llm = engine(folder, enable_prefix_caching=True, block_size=32)
    generated(llm, rows)
    outputs = generated(llm, rows)
    cached = sum(output.num_cached_tokens for output in outputs)
    different += compare(f"{name}, {cached} tokens from the cache", outputs, rows) + (cached == 0)
    del llm
    llm = engine(folder, enable_prefix_caching=False, **SMALL_CACHE)
    outputs = generated(llm, rows)
    preempted = sum(one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions")
    different += compare(f"{name}, {preempted} preemptions", outputs, rows) + (preempted == 0)
    del llm
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"  # a core for each process
    llm = engine(folder, tensor_parallel_size=2, **WHOLE)
    different += compare(f"{name}, in two processes", generated(llm, rows), rows)
    del os.environ["VLLM_CPU_OMP_THREADS_BIND"]
    return different


def compiled(folder: Path, rows: Rows) -> int:
    """How much is wrong with compiled layers, which must be compiled before the first request."""
    llm = engine(folder, enforce_eager=False, **WHOLE)
    graphs = len(_debug_get_cache_entry_list(Stack.forward.__code__))
    different = compare(f"{folder.name}, compiled", generated(llm, rows), rows)
    different += compare(f"{folder.name}, compiled, alone", generated(llm, rows[:1]), rows[:1])
    later = len(_debug_get_cache_entry_list(Stack.forward.__code__)) - graphs
    print(f"  {graphs} graphs before the first request, {later} later")
    return different + later + (graphs == 0)


def is_refused(folder: Path, words: str, options: dict[str, Any]) -> bool:
    """Whether a model is refused when it is loaded, with these words."""
    try:
        engine(folder, **options)
    except Exception as error:
        print(f"{folder.name} is refused: {error}")
        return words in str(error)
    return False


def damaged(folder: Path, name: str) -> Path:
    """The folder of a copy without one weight."""
    shutil.copytree(folder / name, copy := folder / "damaged")
    weights = load_file(copy / "model.safetensors")
    rest = {key: value for key, value in weights.items() if not key.endswith(DAMAGED)}
    save_file(rest, copy / "model.safetensors", {"format": "pt"})
    return copy


def beside_failing(folder: Path) -> int:
    """How much is wrong where requests diverge, never end or are not finite, among others."""
    rows = json.loads((folder / "usual.json").read_text())
    fail = [rows[0] | {"prompt": [7, 8, token, 9, 10]} for token in (2, 3, 4)]
    records: list[logging.LogRecord] = []
    logger = logging.getLogger("vllm.deqseq")
    logger.addFilter(lambda record: not records.append(record))
    evaluated: list[int] = []
    llm = engine(folder, enable_prefix_caching=False, **SMALL_CACHE)
    llm.apply_model(
        lambda model: model.core.register_forward_pre_hook(
            lambda _, arguments: evaluated.append(len(arguments[1]))
        )
    )
    # no file may hold such a weight
    llm.apply_model(lambda model: model.embed_tokens.weight.data[4].fill_(math.nan).sum().item())
    before = counted_iterations()
    outputs = generated(llm, [*fail, *rows])
    wrong = compare("beside requests that fail", outputs[3:], rows)
    iterations, work = counted_iterations() - before, sum(evaluated)
    print(f"{iterations} iterations of a token, {work} evaluations of one")
    wrong += iterations != work
    # blocks of the request that is not finite are used again
    wrong += compare("after requests that fail", generated(llm, rows), rows)
    lines = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    print(*lines, sep="\n")
    for words in (*FAILING.values(), "20 not converged, 20 diverged"):
        wrong += sum(words in line for line in lines) != 1
    return wrong + (len(lines) != 3)


def counted_iterations() -> float:
    """What the counter says that /metrics shows."""
    return REGISTRY.get_sample_value("deqseq_iterations_total") or 0


def main(folder: Path, names: Sequence[str]) -> int:
    """Compare all models, or those named."""
    different = 0
    for name in names or sorted(path.parent.name for path in folder.glob("*/reference.json")):
        rows = json.loads((folder / name / "reference.json").read_text())
        llm = engine(folder / name, **WHOLE)
        different += compare(f"{name}, batched", generated(llm, rows), rows)
        different += compare(f"{name}, alone", [generated(llm, [row])[0] for row in rows], rows)
        del llm
        if name in CLOSELY:
            different += in_all_ways(folder / name, rows)
        if name == "llama-concat":
            different += compiled(folder / name, rows)
        if (exactly := folder / name / "exactly.json").exists():
            rows = json.loads(exactly.read_text())
            for way in ("eager", "compiled"):
                llm = engine(
                    folder / name, hf_overrides=EXACTLY, enforce_eager=way == "eager", **WHOLE
                )
                different += compare(
                    f"{name}, exactly 8 iterations, {way}", generated(llm, rows), rows
                )
                del llm
    if not names:
        different += beside_failing(folder / "failing")
        different += not is_refused(damaged(folder, "implicit"), DAMAGED, {})
        for name, words, options in REFUSED:
            different += not is_refused(folder / name, words, options)
    return different


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]) > 0)
