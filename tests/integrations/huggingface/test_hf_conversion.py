"""What is no model of this library is refused with a remedy."""

import pytest
from hf_models import LLAMA, Llama, Mamba2, Retrofit
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


def test_fields_that_the_model_decides_are_refused_and_others_taken():
    lm = to_causal_lm(Llama().model())
    config = from_causal_lm(lm, initializer_range=0.5, max_position_embeddings=77).config
    assert (config.initializer_range, config.max_position_embeddings) == (0.5, 77)
    for one in (lm, to_causal_lm(Retrofit().model())):
        with pytest.raises(ValueError, match="leave out solve, vocab_size"):
            from_causal_lm(one, vocab_size=20, solve={"stop": {"max_steps": 8}})


@pytest.mark.parametrize("implicit", [True, False])
def test_an_injection_that_loading_would_not_build_as_it_is_is_refused(implicit):
    """Ouro is implicit without one."""
    backbone = dq.Llama(dq.LlamaConfig(d_model=16, n_heads=2, injection=not implicit))
    model = dq.ImplicitModel(backbone, dq.SolveConfig(start="input")) if implicit else dq.ExplicitModel(backbone)
    with pytest.raises(
        TypeError,
        match=rf"must have a backbone with injection=True.* got {type(model).__name__} with injection={not implicit}",
    ):
        from_causal_lm(dq.CausalLM(10, model))
