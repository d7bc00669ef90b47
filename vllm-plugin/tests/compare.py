"""Tokens of vLLM beside those that deqseq generated: ``compare.py FOLDER``, the folder of ``make_models.py``.

A difference is allowed where two tokens are equally probable to 1e-3; anything else fails.
"""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

Rows = Sequence[dict[str, Any]]
BATCH = 60


def engine(folder: Path, **options: Any) -> LLM:
    """A small engine in this process."""
    options = {"max_model_len": 256, "dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True} | options
    return LLM(model=str(folder), **options)


def generated(llm: LLM, rows: Rows) -> list[Any]:
    """What vLLM generates for all prompts at once."""
    new = len(rows[0]["tokens"])
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, logprobs=1, detokenize=False)
    return llm.generate([{"prompt_token_ids": row["prompt"]} for row in rows], params, use_tqdm=False)


def compare(name: str, outputs: list[Any], rows: Rows) -> int:
    """How many prompts got other tokens."""
    different, largest = 0, 0.0
    for output, row in zip(outputs, rows, strict=True):
        made = output.outputs[0]
        if list(made.token_ids) != row["tokens"]:
            different += row["gap"] > 1e-3
            print(f"  {name}: prompt of {len(row['prompt'])} tokens differs, smallest gap {row['gap']:.1e}")
            continue
        ours = [next(iter(one.values())).logprob for one in made.logprobs]
        largest = max(largest, *(abs(a - b) for a, b in zip(ours, row["logprobs"], strict=True)))
    print(f"{name}: {len(rows) - different} of {len(rows)} equal, log probabilities to {largest:.1e}", flush=True)
    return different


def main(folder: Path, names: Sequence[str]) -> int:
    """Compare all models, or those named."""
    different = 0
    for name in names or sorted(path.parent.name for path in folder.glob("*/reference.json")):
        rows = json.loads((folder / name / "reference.json").read_text())
        llm = engine(folder / name)
        different += compare(f"{name}, batched", generated(llm, rows), rows)
        alone = [generated(llm, [row])[0] for row in rows[:BATCH]]
        different += compare(f"{name}, alone", alone, rows[:BATCH])
    return different


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]) > 0)
