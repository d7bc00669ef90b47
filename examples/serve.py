"""A looped model in vLLM: saved, served on this machine, asked, and compared with ``generate``.

vLLM needs an environment of its own, with the plugin in ``vllm-plugin``; ``--python`` is its
interpreter. Without ``--model`` a tiny Llama with random weights is looped.

    python examples/serve.py --python ~/vllm/bin/python --model runs/retrofit/looped/model
"""

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from corpus import babble, train_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm, retrofit

PROMPTS = ("the king sees", "a ghost and the fool", "the queen mocks the king and hears")


def save_tiny(folder: Path) -> None:
    """A Llama of 4 layers, of which the middle ones are iterated, and a tokenizer."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(babble(50), vocab_size=290)
    tokenizer.save_pretrained(folder)
    sizes: Any = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 4,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), initializer_range=0.1, eos_token_id=0, bos_token_id=0, **sizes
    )
    theirs: Any = LlamaForCausalLM(config)
    lm = retrofit(
        theirs, prelude=1, core=2, coda=1, eval_solve=dq.SolveConfig(dq.Naive(), dq.Stop(rtol=1e-4))
    )
    injection: Any = next(part for part in lm.modules() if isinstance(part, dq.ConcatInjection))
    with torch.no_grad():
        injection.weight[:, :64].normal_(std=0.03)  # a new injection ignores the state
    from_causal_lm(lm).save_pretrained(folder)


@contextmanager
def server(python: str, model: Path, log: Path) -> Iterator[str]:
    """The address of a server, which is stopped afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--enforce-eager",
    ]
    command += [
        "--served-model-name",
        "looped",
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--dtype",
        "float32",
    ]
    settings = {"PROMETHEUS_MULTIPROC_DIR": str(log.parent), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | settings)
    try:
        while not answers(f"http://127.0.0.1:{port}/health"):
            if process.poll() is not None:
                raise SystemExit(f"the server ended:\n{log.read_text()[-2000:]}")
            time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def answers(address: str) -> bool:
    """Whether a server is there."""
    try:
        return urlopen(address).status == 200
    except OSError:
        return False


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve, ask, compare; an error if a text differs."""
    parser = argparse.ArgumentParser(
        description="A looped model is served by vLLM and compared with generate."
    )
    parser.add_argument(
        "--python", required=True, help="the interpreter of the environment that has vLLM"
    )
    parser.add_argument(
        "--model", type=Path, help="a folder that save_pretrained wrote. Default: a tiny model"
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        model, log, same = options.model or Path(scratch, "model"), Path(scratch, "log"), 0
        if options.model is None:
            save_tiny(model)
        ours: Any = AutoModelForCausalLM.from_pretrained(model)
        with server(options.python, model, log) as address:
            for prompt in PROMPTS:
                asked = {"model": "looped", "prompt": prompt, "max_tokens": 24, "temperature": 0}
                asked["return_token_ids"] = True
                header = {"Content-Type": "application/json"}
                with urlopen(
                    Request(f"{address}/v1/completions", json.dumps(asked).encode(), header)
                ) as answer:
                    (choice,) = json.load(answer)["choices"]
                ids = torch.tensor([choice["prompt_token_ids"]])
                made = ours.generate(ids, max_new_tokens=24, do_sample=False)[
                    0, ids.shape[1] :
                ].tolist()
                same += made == choice["token_ids"]
                print(f"{prompt!r} -> {choice['text']!r}")
            counters = urlopen(f"{address}/metrics").read().decode().splitlines()
        for line in log.read_text().splitlines() + counters:
            if "iterations each" in line or line.startswith("deqseq_"):
                print(line.rpartition("] ")[2])
    if same < len(PROMPTS):
        raise SystemExit(
            f"generate makes another text after {len(PROMPTS) - same} of {len(PROMPTS)} prompts"
        )
    print(f"{same} of {len(PROMPTS)} texts are those of generate")


if __name__ == "__main__":
    main()
