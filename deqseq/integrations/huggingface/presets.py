"""The paper's models as configurations that transformers reads by path."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from deqseq.backbones import LlamaConfig
from deqseq.integrations.huggingface.configuration import ImplicitConfig
from deqseq.integrations.huggingface.llama import ImplicitLlamaConfig
from deqseq.integrations.huggingface.mamba2 import ImplicitMamba2Config
from deqseq.models.presets import preset

END_OF_TEXT = 0
"""The id of ``<|endoftext|>`` in the GPT-NeoX tokenizer of the language models; it begins and ends documents."""


def preset_config(name: str) -> ImplicitConfig:
    """One of the paper's models as a configuration.

    Args:
        name: one of :func:`deqseq.preset_names`.

    Returns:
        The configuration. Those of language models have the end-of-text token of the GPT-NeoX tokenizer; the
        state-tracking model has none.

    Raises:
        ValueError: an unknown name, with the nearest known ones.

    Example:
        >>> preset_config("mamba2-130m-implicit").hidden_size
        768
    """
    spec = preset(name)
    config_class = ImplicitLlamaConfig if isinstance(spec.backbone, LlamaConfig) else ImplicitMamba2Config
    text = {} if name.endswith("-state-tracking") else {"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT}
    return config_class.from_specification(spec, **text)


def deqseq_preset(name: str) -> str:
    """A path from which transformers reads the configuration of one of the paper's models.

    Args:
        name: one of :func:`deqseq.preset_names`.

    Returns:
        The path of a folder with a ``config.json``, which is removed when the process ends.

    Raises:
        ValueError: an unknown name, with the nearest known ones.

    Example:
        >>> from transformers import AutoConfig
        >>> config = AutoConfig.from_pretrained(deqseq_preset("llama3-1.3b-implicit"))
        >>> type(config).__name__, config.hidden_size, config.solve["stop"]["max_steps"]
        ('ImplicitLlamaConfig', 2048, 32)
    """
    config = preset_config(name)
    folder = _folder() / name
    if not folder.exists():
        config.save_pretrained(folder)
    return str(folder)


@cache
def _folder() -> Path:
    """A folder of this process alone."""
    folder = Path(tempfile.mkdtemp(prefix="deqseq-presets-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
