"""``solve`` of lm-eval's model: checked where it is given."""

import hf_models
import pytest
import torch
from hf_models import made
from transformers import LlamaConfig, LlamaForCausalLM

import deqseq as dq

pytestmark = pytest.mark.evaluation
SOLVE = {"stop": dq.Stop(rtol=1e-3)}


def plain():
    sizes = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes))


def words():
    """A tokenizer whose padding is the end of a text, too."""
    return hf_models.words(eos_token="w0")


def continued(batch_size, window=1):
    """lm-eval's continuations of three prompts, up to a word, and the counts of the solves."""
    from lm_eval.api.instance import Instance

    from deqseq.integrations.lm_eval import SolvedLM

    lm = SolvedLM(made("mamba2"), words(), window=window, batch_size=batch_size, max_length=64)
    how = {"until": ["w5 "], "max_gen_toks": 12}
    prompts = ("w1 w2 w3", "w7 w4 w9", "w5 w5 w2")
    requests = [Instance("generate_until", {}, (prompt, how), 0) for prompt in prompts]
    return lm.generate_until(requests), lm.counted


def test_rows_that_have_ended_are_not_counted():
    (texts, alone), (same, together) = continued(1), continued(4)
    assert texts == same
    assert len({len(text.split()) for text in texts}) > 1
    for name in ("converged of", "self_iterations of", "converged"):
        assert together[name] == alone[name]
    assert together["evaluations"] < alone["evaluations"]


def test_texts_are_generated_in_windows():
    (texts, alone), (same, together) = continued(4), continued(4, window=None)
    assert texts == same
    assert together["evaluations"] < alone["evaluations"] / 2
    for name in ("converged", "converged of", "self_iterations of"):
        assert together[name] == alone["converged of"]


def test_the_trials_of_a_batch_size_are_not_counted():
    (_, fixed), (_, found) = continued(4), continued("auto")
    assert found["converged of"] == fixed["converged of"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_the_solves_of_a_model_with_adapters_are_counted():
    from lm_eval.api.instance import Instance
    from peft import LoraConfig, get_peft_model

    from deqseq.integrations.lm_eval import SolvedLM

    model = get_peft_model(made("mamba2"), LoraConfig(target_modules=["in_proj"]))
    lm = SolvedLM(model, words())
    lm.loglikelihood([Instance("loglikelihood", {}, ("w1 w2 w3", " w4 w5"), 0)])
    assert lm.tally()["converged"] == 1


@torch.no_grad()
def test_a_saved_retrofit_is_scored_by_lm_eval_itself(tmp_path):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from deqseq.integrations.lm_eval import SolvedLM

    tokenizer = words()
    model = made("decoder", solve={"stop": {"rtol": 1e-5}}).float()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    told = model(torch.tensor([[1, 2, 3, 4]])).logits[0].log_softmax(-1)
    request = Instance("loglikelihood", {}, ("w1 w2 w3", " w4 w5"), 0)
    for lm in (
        HFLM(pretrained=str(tmp_path), device="cpu", dtype="float32"),
        SolvedLM(model, tokenizer, SOLVE),
    ):
        ((nats, _),) = lm.loglikelihood([request])
        assert abs(nats - (told[2, 4] + told[3, 5]).item()) < 0.05


def implicit():
    return made("mamba2")


def explicit():
    return made("explicit")


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (plain, {"solve": SOLVE}, r"^leave out solve: LlamaForCausalLM is no implicit model"),
        (explicit, {"solve": SOLVE}, r"^leave out solve: .* is explicit"),
        (implicit, {"solve": {"swep": 1}}, r"field 'swep' .*did you mean 'sweep'"),
        (plain, {"window": 8}, r"^leave out window: LlamaForCausalLM is no implicit model"),
        (explicit, {"window": 8}, r"^window must be 1, got 8: an explicit model"),
        (implicit, {"batch_size": 0}, r"SolvedLM\.batch_size must be an integer .*, got 0"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(make, options, message):
    from deqseq.integrations.lm_eval import SolvedLM  # of an extra that the other tests do without

    model = make()
    with pytest.raises(ValueError, match=message):
        SolvedLM(model, words(), **options)
    assert SolvedLM(model, words()).options == {}
