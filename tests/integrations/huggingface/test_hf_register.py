"""Who imports what, and what transformers then knows."""

import inspect
import re
import subprocess
import sys

import pytest
import transformers
from hf_models import Llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from deqseq.integrations import huggingface

EXPORTED = [getattr(huggingface, name) for name in huggingface.__all__]
MODELS = [one for one in EXPORTED if isinstance(one, type) and issubclass(one, PreTrainedModel)]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_takes_what_its_docstring_lists(model):
    arguments = inspect.getdoc(model).partition("Args:\n")[2].partition("\n\n")[0]
    listed = re.findall(r"^    \**(\w+): ", arguments, flags=re.MULTILINE)
    assert "config" in listed
    assert set(listed) <= inspect.signature(model).parameters.keys()


def run(script: str) -> str:
    """What a fresh interpreter prints, without this one's checks of shapes."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_library_imports_no_transformers():
    script = "import sys, deqseq, deqseq.integrations; print([m for m in sys.modules if 'transformers' in m])"
    assert run(script) == "[]\n"


def test_without_transformers_the_extra_is_named():
    script = (
        "import sys; sys.modules['transformers'] = None\n"
        "try: import deqseq.integrations.huggingface\n"
        "except ImportError as error: print(error)"
    )
    assert run(script) == 'deqseq.integrations.huggingface needs transformers: pip install "deqseq[hf]"\n'


def test_a_saved_model_is_loaded_without_an_import(tmp_path):
    """As lm-eval and TRL load it."""
    model = Llama().model()
    model.save_pretrained(tmp_path)
    script = (
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        f"folder = {str(tmp_path)!r}\n"
        "try: AutoConfig.from_pretrained(folder, trust_remote_code=False)\n"
        "except ValueError as error: print('trust_remote_code=True' in str(error))\n"
        "model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, gguf_file=None)\n"
        "print(type(model).__module__, model.config.auto_map['AutoModelForCausalLM'])\n"
        "model.save_pretrained(folder + '/again')\n"
        "import os; print(sorted(os.listdir(folder + '/again')))"
    )
    assert run(script).splitlines() == [
        "True",
        "deqseq.integrations.huggingface.llama deqseq_models.ImplicitLlamaForCausalLM",
        "['config.json', 'deqseq_models.py', 'generation_config.json', 'model.safetensors']",
    ]


def test_the_auto_classes_know_every_model_type():
    for name in ("ImplicitMamba2", "ImplicitLlama", "RecurrentDepth"):
        config = getattr(huggingface, f"{name}Config")
        assert AutoConfig.for_model(config.model_type).__class__ is config
        assert AutoModel._model_mapping[config] is getattr(huggingface, f"{name}Model")
        assert AutoModelForCausalLM._model_mapping[config] is getattr(huggingface, f"{name}ForCausalLM")
        classifier = getattr(huggingface, f"{name}ForSequenceClassification")
        assert AutoModelForSequenceClassification._model_mapping[config] is classifier


def test_the_public_names_are_there():
    assert sorted(huggingface.__all__) == huggingface.__all__
    assert all(hasattr(huggingface, name) for name in huggingface.__all__)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_folder_with_a_tokenizer_is_a_pipeline(tmp_path):
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(13)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left").save_pretrained(tmp_path)
    model = Llama().model()
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    pipe = transformers.pipeline(
        "text-generation", model=str(tmp_path), tokenizer=tokenizer, device="cpu", batch_size=2
    )
    prompts = ["w1 w2 w3", "w4 w5"]
    batched = pipe(prompts, max_new_tokens=3, do_sample=False, return_full_text=False)
    for prompt, (found,) in zip(prompts, batched, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        wanted = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert found["generated_text"].split() == [f"w{token}" for token in wanted.tolist()]
