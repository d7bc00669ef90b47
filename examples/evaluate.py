r"""lm-eval's own command line, to which this adds ``--model deqseq``: saved models, solved as told.

The numbers of the solves are printed, and stand in lm-eval's results under ``config``, ``solves``.

    python examples/evaluate.py run --model deqseq --model_args pretrained=MODEL --tasks piqa
    python examples/evaluate.py run --model deqseq --tasks piqa \
        --model_args '{"pretrained": "MODEL", "solve": {"stop": {"max_steps": 8}}}'
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

if __name__ == "__main__":
    # this folder comes last, because lm-eval imports a package that is also called evaluate
    sys.path.append(sys.path.pop(0))

import torch
from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
from training_loop import one_process
from transformers import AutoModelForCausalLM, AutoTokenizer

from deqseq.integrations.lm_eval import SolvedLM


@register_model("deqseq")
class SavedLM(SolvedLM):
    """A saved model, as ``--model_args`` names it.

    Args:
        pretrained: a folder written by ``save_pretrained``, or a name on the hub.
        tokenizer: the same of its tokenizer. Default: the model's own.
        solve: fields of the model's :class:`deqseq.SolveConfig` to replace. Default: as the model
            has them.
        device: where to run. lm-eval's default is cuda; without a GPU it is the CPU, as in lm-eval.
        **options: ``window``, ``batch_size`` and ``max_length`` of
            :class:`deqseq.integrations.lm_eval.SolvedLM`.
    """

    def __init__(
        self,
        pretrained: str,
        tokenizer: str | None = None,
        solve: Mapping[str, Any] | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        place = device if device and torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(pretrained)
        options.pop("max_batch_size", None)  # of lm-eval's command line, for batch_size=auto
        model = model.to(place).eval()
        super().__init__(
            model, AutoTokenizer.from_pretrained(tokenizer or pretrained), solve, **options
        )

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes about a model at the end, with the numbers of its solves."""
        solves = self.tally()
        print("solves:", json.dumps(solves))
        return super().get_model_info() | {"solves": solves}


if __name__ == "__main__":
    one_process("evaluate.py")
    cli_evaluate()
