"""Who imports what, what transformers then knows, and the paper's files through Auto classes."""

import json

import pytest
import torch
import transformers
from hf_models import close, made, words
from integrations.golden import config, numbers, tensors
from processes import output_of
from transformers import AutoConfig, AutoTokenizer

import deqseq as dq
from deqseq.integrations import huggingface
from deqseq.integrations.foreign import from_pretrained, from_reference_config
from deqseq.integrations.huggingface import from_causal_lm

HEADS = ("Model", "ForCausalLM", "ForSequenceClassification")


def test_the_auto_classes_know_the_model_type_and_files_name_it(tmp_path):
    assert AutoConfig.for_model("deqseq").__class__ is huggingface.DeqseqConfig
    for head in HEADS:
        auto = getattr(transformers, f"Auto{head.replace('For', 'ModelFor')}")
        model = getattr(huggingface, f"Deqseq{head}")
        assert auto._model_mapping[huggingface.DeqseqConfig] is model
    huggingface.DeqseqConfig().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "deqseq"
    assert written["deqseq_version"] == dq.__version__
    assert {name.removeprefix("Auto") for name in written["auto_map"]} == {
        "Config",
        *(head.replace("For", "ModelFor") for head in HEADS),
    }
    assert written["auto_map"]["AutoModelForCausalLM"] == "deqseq_models.DeqseqForCausalLM"


def test_nothing_optional_is_imported_and_without_transformers_the_extra_is_named():
    script = (
        "import sys, deqseq.diagnostics, deqseq.integrations.torchdeq\n"
        "extras = {'matplotlib', 'transformers', 'torchdeq'}\n"
        "print([m for m in sys.modules if m in extras])\n"
        "sys.modules['transformers'] = None\n"
        "try: import deqseq.integrations.huggingface\n"
        "except ImportError as error: print(error)"
    )
    told = 'deqseq.integrations.huggingface needs transformers: pip install "deqseq[hf]"'
    assert output_of("-c", script).splitlines() == ["[]", told]


def test_a_saved_model_is_loaded_without_an_import(tmp_path):
    """As lm-eval and TRL load it."""
    made("llama").save_pretrained(tmp_path)
    script = (
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        f"folder = {str(tmp_path)!r}\n"
        "try: AutoConfig.from_pretrained(folder, trust_remote_code=False)\n"
        "except ValueError as error: print('trust_remote_code=True' in str(error))\n"
        "model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, "
        "gguf_file=None)\n"
        "print(type(model).__module__, model.config.auto_map['AutoModelForCausalLM'])\n"
        "model.save_pretrained(folder + '/again')\n"
        "import os; print(sorted(os.listdir(folder + '/again')))"
    )
    assert output_of("-c", script).splitlines() == [
        "True",
        "deqseq.integrations.huggingface.modeling_causal_lm deqseq_models.DeqseqForCausalLM",
        "['config.json', 'deqseq_models.py', 'generation_config.json', 'model.safetensors']",
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_folder_with_a_tokenizer_is_a_pipeline(tmp_path):
    words(padding_side="left").save_pretrained(tmp_path)
    model = made("llama")
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    options = {"tokenizer": tokenizer, "device": "cpu", "batch_size": 2}
    pipe = transformers.pipeline("text-generation", model=str(tmp_path), **options)
    prompts = ["w1 w2 w3", "w4 w5"]
    batched = pipe(prompts, max_new_tokens=3, do_sample=False, return_full_text=False)
    for prompt, (found,) in zip(prompts, batched, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        tokens = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)[0, -3:]
        assert found["generated_text"].split() == [f"w{token}" for token in tokens.tolist()]


@pytest.mark.parametrize("kind", ["llama", "mamba2"])
def test_a_reference_folder_with_pickled_weights_is_converted(kind, tmp_path):
    known = numbers(kind)
    (tmp_path / "config.json").write_text(json.dumps(config(kind)))
    torch.save(tensors(kind), tmp_path / "pytorch_model.bin")
    model = from_causal_lm(from_pretrained(tmp_path))
    close(model(known["input_ids"].long()).logits, known["eval_logits"], 1e-5)
    assert model.config.specification() == from_reference_config(config(kind))
