"""A tiny Ouro gives the numbers of its authors' code: every loop, decoding, training, and the choice of its gate."""

from contextlib import contextmanager

import pytest
import torch
from released import assert_near, config, decoded, loaded, numbers, weights
from small_models import Logits

from deqseq.integrations.ouro_gate import OuroGate
from deqseq.integrations.recurrent_depth import from_state


@contextmanager
def gated(lm, threshold):
    """Tokens take the state of the loop at which the gate's probabilities reach a threshold."""
    gate = lm.model.backbone.choose
    before, gate.threshold = gate.threshold, threshold
    try:
        yield
    finally:
        gate.threshold = before


@torch.no_grad()
def test_every_loop_of_ouro():
    golden = numbers("ouro")
    assert_near(loaded("ouro")(golden["input_ids"]).logits, golden["eval_logits"])
    for loop in range(4):
        found = loaded("ouro", loop + 1)(golden["input_ids"]).logits
        assert_near(found, golden["loop_logits"][:, :, loop])


def test_ouro_decodes_with_a_cache_per_loop():
    lm, golden = loaded("ouro"), numbers("ouro")
    assert_near(decoded(lm, golden["input_ids"]), golden["decode_logits"])
    generated = lm.generate(golden["input_ids"][:, :11], max_new_tokens=6).tokens
    ids = golden["input_ids"][:, :11]
    for _ in range(6):  # without a cache
        with torch.no_grad():
            ids = torch.cat([ids, lm(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, ids[:, 11:])


@pytest.mark.parametrize("threshold", [1.0, 0.5])
def test_ouro_trains_through_all_loops(threshold):
    """The published loss weighs the loops by the gate; the loss of the states that are chosen has this gradient."""
    given = config("ouro") | {"early_exit_threshold": threshold}
    lm, golden = from_state(given, weights("ouro")).train(), numbers("ouro")
    ids = golden["input_ids"]
    lm(ids, labels=ids).loss.backward()
    plain = from_state(config("ouro"), weights("ouro"))
    states, layers = [plain.embed(ids)], plain.model.backbone.backbone
    for _ in range(4):
        states.append(layers(states[-1], layers.prepare(states[-1]))[0])
    loops = 1 + (golden["exit_pdf"].cumsum(dim=2)[..., :3] < threshold).cumprod(dim=2).sum(dim=2)
    loops = loops if threshold < 1 else torch.full_like(loops, 4)
    chosen = sum((loops == loop)[..., None] * state for loop, state in enumerate(states))
    logits = plain.logits(chosen)[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    wanted = dict(plain.named_parameters())
    for key, parameter in lm.named_parameters():
        if parameter.requires_grad:
            assert_near(parameter.grad, wanted[key].grad)
    assert [key for key, parameter in lm.named_parameters() if not parameter.requires_grad] == [
        "model.backbone.choose.linear.weight",
        "model.backbone.choose.linear.bias",
    ]


@pytest.mark.parametrize("threshold", [0.5, 0.8, 1.0])
@torch.no_grad()
def test_ouro_chooses_by_its_gate(threshold):
    golden = numbers("ouro")
    lm = from_state(config("ouro") | {"early_exit_threshold": threshold}, weights("ouro"))
    name = "eval_logits" if threshold == 1 else f"threshold_{threshold}_logits"
    assert_near(lm(golden["input_ids"]).logits, golden[name])
    reached = golden["exit_pdf"].cumsum(dim=2)[..., :3] >= threshold  # the last loop ends in any case
    loops = 1 + (~reached).cumprod(dim=2).sum(dim=2)
    gate = lm.model.backbone.choose
    assert torch.equal(gate.loops(golden["states"].movedim(2, 0)), loops)
    assert threshold == 1 or len(loops.unique()) > 1
    with gated(loaded("ouro"), threshold):
        assert_near(loaded("ouro")(golden["input_ids"]).logits, golden[name])


@torch.no_grad()
def test_the_gate_itself():
    gate, golden = loaded("ouro").model.backbone.choose, numbers("ouro")
    assert_near(gate.linear(golden["states"])[..., 0], golden["gate_logits"])
    states = golden["states"].movedim(2, 0)
    assert torch.equal(gate(states[:1]), states[0])  # one loop: there is nothing to choose
    with gated(loaded("ouro"), 0.0):
        assert torch.equal(gate(states), states[0])
    certain = OuroGate(torch.nn.Linear(24, 1).double())
    certain.linear.bias.fill_(1e4)
    assert torch.equal(certain(states), states[-1])  # although its probabilities are 1
    for bad in (-0.1, 1.1, "half"):
        with pytest.raises((TypeError, ValueError), match=r"OuroGate\.threshold"):
            OuroGate(gate.linear, bad)
    with pytest.raises(TypeError, match=r"OuroGate\.linear must be a Module"):
        OuroGate(torch.relu)


def test_ouro_chooses_while_it_decodes():
    lm, golden = loaded("ouro"), numbers("ouro")
    with gated(lm, 0.5):
        assert_near(decoded(lm, golden["input_ids"]), golden["threshold_0.5_logits"][:, 11:])
        assert lm.generate(golden["input_ids"], max_new_tokens=3).tokens.shape == (3, 3)


@pytest.mark.usefixtures("unchecked")
@torch.no_grad()
def test_ouro_without_a_gate():
    state = {name: tensor for name, tensor in weights("ouro").items() if "early_exit_gate" not in name}
    lm = from_state(config("ouro"), state)
    assert lm.model.backbone.choose is None
    assert_near(lm(numbers("ouro")["input_ids"]).logits, numbers("ouro")["eval_logits"])
    with pytest.raises(ValueError, match=r"missing.*model\.backbone\.choose\.linear"):
        from_state(config("ouro") | {"early_exit_threshold": 0.5}, state)


@pytest.mark.filterwarnings("ignore")
def test_the_gate_is_exported():
    lm, ids = loaded("ouro"), numbers("ouro")["input_ids"]
    with torch.no_grad(), gated(lm, 0.5):
        exported = torch.export.export(Logits(lm), (ids,), strict=False).module()
        assert_near(exported(ids), numbers("ouro")["threshold_0.5_logits"])
