"""Loading for examples/evaluate.py: a saved model with a tokenizer that fits it."""

from typing import Any

from tokenizers.processors import Sequence as Processors
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from deqseq.tasks.text.tokenizer import load_tokenizer


def load(name: str, source: str, *, device: str, bos: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A saved model and its tokenizer.

    Args:
        name: folder of the model, or its name on the hub.
        source: the same of the tokenizer.
        device: where the model goes.
        bos: whether the tokenizer is to begin every text with its BOS token.

    Raises:
        SystemExit: names what is missing, or does not fit.
    """
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{name} is no model that can be loaded: {error}") from error
    try:
        tokenizer = load_tokenizer(source)
    except OSError as error:
        raise SystemExit(f"{error}; save it there with tokenizer.save_pretrained(), or give --tokenizer") from error
    room = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > room:
        raise SystemExit(f"the tokenizer of {source} has {len(tokenizer)} tokens and the model {name} knows {room}")
    if bos:
        begin_with_bos(tokenizer, source)
    whole, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    if whole[-len(plain) :] != plain:
        raise SystemExit(f"the tokenizer of {source} adds tokens behind a text, where its continuation should begin")
    if tokenizer.pad_token is None:  # what stands at padding does not matter: the attention mask leaves it out
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return model.to(device).eval(), tokenizer


def begin_with_bos(tokenizer: Any, source: str) -> None:
    """Have a tokenizer put its BOS token before every text, if it does not already.

    Raises:
        SystemExit: it has none.
    """
    if tokenizer.bos_token is None:
        raise SystemExit(f"--bos needs a tokenizer with a BOS token, and that of {source} has none")
    if tokenizer.encode("a")[0] != tokenizer.bos_token_id:
        known = [(tokenizer.bos_token, tokenizer.bos_token_id)]
        bos = TemplateProcessing(single=f"{tokenizer.bos_token} $A", special_tokens=known)
        before = tokenizer.backend_tokenizer.post_processor
        tokenizer.backend_tokenizer.post_processor = bos if before is None else Processors([before, bos])
