"""``solve`` of lm-eval's model: checked where it is given."""

import pytest
from hf_models import Mamba2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import deqseq as dq

pytestmark = pytest.mark.evaluation
SOLVE = {"stop": dq.Stop(rtol=1e-3)}


def plain():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=13, **sizes))


def explicit():
    family = Mamba2()
    family.implicit = False
    return family.model()


@pytest.mark.parametrize(
    ("make", "solve", "message"),
    [
        (plain, SOLVE, r"^leave out solve: LlamaForCausalLM is no implicit model"),
        (explicit, SOLVE, r"^leave out solve: .* is explicit"),
        (lambda: Mamba2().model(), {"swep": "Sliding"}, r"field 'swep' .*did you mean 'sweep'"),
    ],
    ids=["another library's model", "an explicit model", "a misspelt field"],
)
def test_a_solve_that_cannot_be_honoured_is_an_error(make, solve, message):
    from deqseq.integrations.lm_eval import SolvedLM  # of an extra that the other tests do without

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(13)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0")
    model = make()
    with pytest.raises(ValueError, match=message):
        SolvedLM(model, tokenizer, solve)
    assert SolvedLM(model, tokenizer).solve is None
