"""deqseq's ``generate`` for ``throughput.py``: a number of prompts comes in, a line goes out."""

import json
import sys
from pathlib import Path

import torch

from deqseq.integrations.huggingface import DeqseqForCausalLM, to_causal_lm


def main(folder: Path) -> None:
    """Continue that many prompts for each line of the standard input."""
    lm = to_causal_lm(DeqseqForCausalLM.from_pretrained(folder))
    prompts = torch.tensor(json.loads((folder / "prompts.json").read_text()))
    for line in sys.stdin:
        count, new = map(int, line.split())
        print(lm.generate(prompts[:count], max_new_tokens=new).lengths.sum().item(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
