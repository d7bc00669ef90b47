"""The block to copy passes the contract, and the script ends as its page says."""

import runpy
from pathlib import Path

import pytest
import torch
from own_block import GatedCell

import deqseq as dq
from deqseq.testing import BackboneContract

SCRIPT = Path(__file__).parents[2] / "examples" / "own_block.py"


class TestGatedCell(BackboneContract):
    backbone = GatedCell(8)


def test_it_generates_what_a_forward_pass_predicts():
    torch.manual_seed(0)
    lm = dq.CausalLM(5, dq.ImplicitModel(GatedCell(8)), embedding_std=1.0).double()
    stop, prompt = dq.Stop(rtol=1e-8, max_steps=500), torch.tensor([[1, 4, 2]])
    for window in (1, 4):
        made = lm.generate(prompt, max_new_tokens=6, window=window, stop=stop)
        whole = lm.eval()(torch.cat([prompt, made.tokens], dim=1), stop=stop)
        assert torch.equal(whole.logits[:, 2:-1].argmax(-1), made.tokens)
        assert made.converged.all()


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_it_is_short_and_right_at_sixteen_times_the_trained_length(capsys):
    assert len(SCRIPT.read_text().splitlines()) <= 60
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out.count("100% right, CausalLMOutput(8 of 8 rows converged") == 2
