"""retrofit.py's own: adapters, and models that cannot be looped. The rest is in test_pretrain.py."""

import pytest
import retrofit
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig

from deqseq.integrations.huggingface import to_causal_lm


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses an older name of transformers
def test_adapters_are_trained_and_merged(tmp_path):
    pytest.importorskip("peft")
    short = ["--quick", "--steps", "12", "--eval-tokens", "128", "--tiny-steps", "12"]
    retrofit.main([*short, "--lora", "2", "--output", str(tmp_path)])
    tiny, unlooped = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("tiny", "unlooped"))
    assert {name: weight.shape for name, weight in unlooped.items()} == {name: t.shape for name, t in tiny.items()}
    assert not all(weight.equal(tiny[name]) for name, weight in unlooped.items())
    looped = AutoModelForCausalLM.from_pretrained(tmp_path / "looped" / "model")
    assert not [name for name, _ in looped.named_parameters() if "lora" in name]
    injection = to_causal_lm(looped).core.backbone.injection.weight
    assert injection[:, : len(injection)].abs().max() > 0  # it was trained


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "{llama}"], r"^--model .*must add up to the model's 5 layers, got 1 \+ 2 \+ 1 \+ 0"),
        (["--model", "{bloom}"], "^--model .*Bloom"),
        (["--model", "{llama}", "--core", "3"], "^tokenizer .*/llama: .* neither a folder with a tokenizer"),
    ],
)
def test_models_that_cannot_be_looped_are_named_and_nothing_is_written(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    LlamaConfig(num_hidden_layers=5).save_pretrained(tmp_path / "llama")
    BloomConfig().save_pretrained(tmp_path / "bloom")
    given = [part.format(llama=tmp_path / "llama", bloom=tmp_path / "bloom") for part in arguments]
    with pytest.raises(SystemExit, match=message):
        retrofit.main(["--quick", "--output", str(tmp_path / "run"), *given])
    assert not (tmp_path / "run").exists()
