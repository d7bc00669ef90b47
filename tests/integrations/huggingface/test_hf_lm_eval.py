"""``solve`` of lm-eval's model: checked where it is given."""

import pytest
import torch
from hf_models import Mamba2, Retrofit
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
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


@torch.no_grad()
def test_a_saved_retrofit_is_scored_by_lm_eval_itself(tmp_path):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from deqseq.integrations.lm_eval import SolvedLM

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(13)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0")
    model = Retrofit().model(solve={"stop": {"rtol": 1e-5}}).float()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    told = model(torch.tensor([[1, 2, 3, 4]])).logits[0].log_softmax(-1)
    request = Instance("loglikelihood", {}, ("w1 w2 w3", " w4 w5"), 0)
    for lm in (HFLM(pretrained=str(tmp_path), device="cpu", dtype="float32"), SolvedLM(model, tokenizer, SOLVE)):
        ((nats, _),) = lm.loglikelihood([request])
        assert abs(nats - (told[2, 4] + told[3, 5]).item()) < 0.05


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
