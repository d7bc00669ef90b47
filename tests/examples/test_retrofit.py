"""retrofit.py's own: adapters, and models that cannot be looped. The rest is in
test_pretrain.py.
"""

import dataclasses
import json

import gguf_model
import pytest
import retrofit
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, LlamaConfig

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm, to_causal_lm


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses an older name of transformers
def test_adapters_are_trained_and_merged(tmp_path):
    pytest.importorskip("peft")
    short = ["--quick", "--steps", "12", "--eval-tokens", "128", "--tiny-steps", "12"]
    retrofit.main([*short, "--lora", "2", "--output", str(tmp_path)])
    tiny, unlooped = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("tiny", "unlooped")
    )
    assert {name: weight.shape for name, weight in unlooped.items()} == {
        name: t.shape for name, t in tiny.items()
    }
    assert not all(weight.equal(tiny[name]) for name, weight in unlooped.items())
    looped = AutoModelForCausalLM.from_pretrained(tmp_path / "looped" / "model")
    assert not [name for name, _ in looped.named_parameters() if "lora" in name]
    injection = to_causal_lm(looped).core.backbone.injection.weight
    assert injection[:, : len(injection)].abs().max() > 0  # it was trained


@pytest.mark.slow
def test_a_core_learns_to_predict_as_the_pretrained_model_and_the_rest_stays(tmp_path):
    layers = ["--prelude", "1", "--dropped", "1", "--core", "1", "--coda", "1"]
    short = ["--quick", "--steps", "40", "--eval-tokens", "512", *layers]
    retrofit.main([*short, "--distil", "--gate", "0.3", "--output", str(tmp_path)])
    tiny, looped = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        for name in ("tiny", "looped")
    )
    parts = to_causal_lm(looped).model
    assert (parts.core.solve.start, parts.core.eval_solve.start) == ("input", "input")
    for part, layer in ((parts.prelude, 0), (parts.coda, 3), (parts.core.backbone, 2)):
        pairs = zip(
            part.backbone.layers.parameters(), tiny.model.layers[layer].parameters(), strict=True
        )
        assert all(ours.equal(theirs) for ours, theirs in pairs) == (
            part is not parts.core.backbone
        )
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [row["self_iterations"] for row in rows[:2]] == [None, 1.0]
    one_by_one, windowed = rows[-2:]
    assert windowed["evaluations"] < one_by_one["evaluations"]
    assert windowed["equal"] and windowed["converged"]


@pytest.mark.parametrize("gate", [0.0, 0.3, 1.0])
def test_one_iteration_is_the_pretrained_model_with_any_gate(gate):
    options = retrofit.Options(gate=gate, distil=True)
    model, ids = retrofit.tiny(options, 20).eval(), torch.arange(20)[None]
    lm = retrofit.split(model, options)
    once = dataclasses.replace(lm.model.core.solve, stop=dq.Stop.exactly(1))
    torch.testing.assert_close(lm(ids, solve=once).logits, model(ids).logits)
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
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder).eval(),
    )
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, return_tensors="pt", add_generation_prompt=True)[
        "input_ids"
    ]
    looped = from_causal_lm(retrofit.split(model, retrofit.Options(prelude=12, core=10, coda=8)))
    looped.save_pretrained(tmp_path / "looped")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "looped")
    wanted = model.generate(ids, max_new_tokens=9, do_sample=False)
    assert (
        tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True)
        == "The capital of France is Paris."
    )
    assert again.generate(ids, max_new_tokens=9, do_sample=False).equal(wanted)
    tokenizer.padding_side = "left"
    padded = tokenizer(
        ["The capital of France", "In the beginning God created"], return_tensors="pt", padding=True
    )
    assert again.generate(**padded, max_new_tokens=5, do_sample=False).equal(
        model.generate(**padded, max_new_tokens=5, do_sample=False)
    )
    long = ids.repeat(1, 2048 // ids.shape[1] + 1)[:, :2048]
    with torch.no_grad():
        for dtype, tokens in ((torch.float32, long), (torch.bfloat16, long[:, :512])):
            torch.testing.assert_close(
                again.to(dtype)(tokens).logits, model.to(dtype)(tokens).logits
            )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": 0.3, "injection": "add"}, "--gate needs --injection concat, got add"),
        (
            {"lora": 2, "distil": True},
            "--distil trains the weights of the core: leave out --lora, got 2",
        ),
        ({"gate": 1.5}, r"--gate must be a number in \[0, 1\], got 1.5"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        retrofit.Options(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "{llama}"],
            r"^--model .*must add up to the model's 5 layers, got 1 \+ 2 \+ 1 \+ 0",
        ),
        (["--model", "{bloom}"], "^--model .*Bloom"),
        (
            ["--model", "{llama}", "--core", "3"],
            "^tokenizer .*/llama: .* neither a folder with a tokenizer",
        ),
    ],
)
def test_models_that_cannot_be_looped_are_named_and_nothing_is_written(
    tmp_path, monkeypatch, arguments, message
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    LlamaConfig(num_hidden_layers=5).save_pretrained(tmp_path / "llama")
    BloomConfig().save_pretrained(tmp_path / "bloom")
    given = [part.format(llama=tmp_path / "llama", bloom=tmp_path / "bloom") for part in arguments]
    with pytest.raises(SystemExit, match=message):
        retrofit.main(["--quick", "--output", str(tmp_path / "run"), *given])
    assert not (tmp_path / "run").exists()
