"""retrofit.py's own: adapters, and models that cannot be looped. The rest is in
test_pretrain.py.
"""

import dataclasses
import json

import gguf_model
import pytest
import retrofit
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, LlamaConfig

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm, to_causal_lm


def loaded(folder, name):
    return AutoModelForCausalLM.from_pretrained(folder / name / "model").eval()


def retrofitted(folder, options):
    """The pretrained model and the looped one of a short run."""
    retrofit.main(f"--quick --output {folder} {options}".split())
    return loaded(folder, "tiny"), loaded(folder, "looped")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses an older name of transformers
def test_adapters_are_trained_and_merged(tmp_path):
    pytest.importorskip("peft")
    short = "--steps 12 --eval-tokens 128 --tiny-steps 12"
    tiny, looped = retrofitted(tmp_path, f"{short} --lora 2")
    weights = loaded(tmp_path, "unlooped").state_dict()
    assert [*weights] == [*tiny.state_dict()]
    assert not all(weight.equal(weights[name]) for name, weight in tiny.state_dict().items())
    assert not [name for name, _ in looped.named_parameters() if "lora" in name]
    injection = to_causal_lm(looped).core.backbone.injection.weight
    assert injection[:, : len(injection)].abs().max() > 0  # it was trained


@pytest.mark.slow
def test_a_core_learns_to_predict_as_the_pretrained_model_and_the_rest_stays(tmp_path):
    layers = "--prelude 1 --dropped 1 --core 1 --coda 1"
    short = "--steps 40 --eval-tokens 512 --distil --gate 0.3"
    tiny, looped = retrofitted(tmp_path, f"{short} {layers}")
    parts = to_causal_lm(looped).model
    assert parts.core.solve.start == "input"
    assert parts.core.eval_solve.start == "input"
    changed = []
    for part, layer in ((parts.prelude, 0), (parts.core.backbone, 2), (parts.coda, 3)):
        ours = part.backbone.layers.parameters()
        theirs = tiny.model.layers[layer].parameters()
        changed.append(not all(map(torch.equal, ours, theirs)))
    assert changed == [False, True, False]
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["self_iterations"] for row in rows[:2]] == [None, 1.0]
    one_by_one, windowed = rows[-2:]
    assert windowed["evaluations"] < one_by_one["evaluations"]
    assert windowed["equal"]
    assert windowed["converged"]


@pytest.mark.parametrize("gate", [0.0, 0.3, 1.0])
def test_one_iteration_is_the_pretrained_model_with_any_gate(gate):
    options = retrofit.Options(gate=gate, distil=True)
    model = retrofit.tiny(options, 20).eval()
    ids = torch.arange(20)[None]
    lm = retrofit.split(model, options)
    once = dataclasses.replace(lm.model.core.solve, stop=dq.Stop.exactly(1))
    assert_close(lm(ids, solve=once).logits, model(ids).logits)
    trained = {id(weight) for weight in lm.parameters() if weight.requires_grad}
    assert trained == set(map(id, lm.model.core.parameters()))


@pytest.mark.slow
def test_smollm2_is_converted_with_its_tokenizer_and_looped(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        folder = gguf_model.smollm2()
    except OSError as error:
        pytest.skip(str(error))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    split = retrofit.split(model, retrofit.Options(prelude=12, core=10, coda=8))
    from_causal_lm(split).save_pretrained(tmp_path / "looped" / "model")
    looped = loaded(tmp_path, "looped")

    def generated(**inputs):
        tokens, expected = (
            one.generate(**inputs, max_new_tokens=9, do_sample=False) for one in (looped, model)
        )
        assert tokens.equal(expected)
        return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    question = tokenizer.apply_chat_template(
        messages, return_tensors="pt", return_dict=True, add_generation_prompt=True
    )
    assert generated(**question) == "The capital of France is Paris."
    texts = ["The capital of France", "In the beginning God created"]
    generated(**tokenizer(texts, return_tensors="pt", padding=True))
    long = question["input_ids"].repeat(1, 99)[:, :2048]
    with torch.no_grad():
        for dtype, tokens in ((torch.float32, long), (torch.bfloat16, long[:, :512])):
            logits = looped.to(dtype)(tokens).logits
            assert_close(logits, model.to(dtype)(tokens).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": 0.3, "injection": "add"}, "--gate needs --injection concat, got add"),
        ({"lora": 2, "distil": True}, "--distil trains .* the core: leave out --lora, got 2"),
        ({"gate": 1.5}, r"--gate must be a number in \[0, 1\], got 1.5"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        retrofit.Options(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("./llama", r"^--model .*must add up to the model's 5 layers, got 1 \+ 2 \+ 1 \+ 0"),
        ("./bloom", "^--model .*Bloom"),
        ("./llama --core 3", "^tokenizer ./llama: .* neither a folder with a tokenizer"),
    ],
)
def test_models_that_cannot_be_looped_are_named_and_nothing_is_written(
    tmp_path, monkeypatch, arguments, message
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    LlamaConfig(num_hidden_layers=5).save_pretrained("llama")
    BloomConfig().save_pretrained("bloom")
    with pytest.raises(SystemExit, match=message):
        retrofit.main(f"--quick --output run --model {arguments}".split())
    assert not (tmp_path / "run").exists()
