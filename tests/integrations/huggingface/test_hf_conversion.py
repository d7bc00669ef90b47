"""What is no model of this library is refused with a remedy."""

import pytest
from hf_models import LLAMA, Llama, Mamba2
from transformers import LlamaConfig, LlamaForCausalLM

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm, to_causal_lm


def test_a_configuration_of_another_type_is_named():
    with pytest.raises(TypeError, match=r"config must be an ImplicitMamba2Config, got ImplicitLlamaConfig"):
        type(Mamba2().model())(Llama().config())


def test_a_model_of_transformers_must_be_translated_first():
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=13, hidden_size=8, num_hidden_layers=1, **LLAMA))
    with pytest.raises(TypeError, match=r"lm must be a CausalLM, .*from_pretrained_model\(.*got LlamaForCausalLM"):
        from_causal_lm(theirs)
    with pytest.raises(TypeError, match=r"model must be an ImplicitCausalLM, got LlamaForCausalLM"):
        to_causal_lm(theirs)
    with pytest.raises(TypeError, match=r"lm must be a CausalLM, .*got ImplicitMamba2ForCausalLM"):
        from_causal_lm(Mamba2().model())


def test_an_implicit_model_without_an_injection_is_refused():
    """Ouro: loading would build an injection that the file has no weights for."""
    config = dq.LlamaConfig(d_model=16, n_heads=2, injection=False)
    lm = dq.CausalLM(10, dq.ImplicitModel(dq.Llama(config), dq.SolveConfig(start="input")))
    with pytest.raises(TypeError, match="must have an injection"):
        from_causal_lm(lm)
