"""Released recurrent-depth models give the numbers of their authors' code."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from integrations.golden import DATA, config, numbers, tensors
from safetensors.torch import save_file
from torch.nn import functional as F

import deqseq as dq
from deqseq.integrations.foreign import from_pretrained, from_state

NAMES = ("huginn", "retrofit_llama", "retrofit_olmo")
RAVENS = pytest.mark.parametrize("name", NAMES)
RANDOM = dq.RandomStart(0.5, 1)
TIGHT = dq.Stop(rtol=1e-13, max_steps=500)
NAIVE = dq.Naive()


def loaded(name, steps=None, **changes):
    return from_state(config(name) | changes, tensors(name), steps)


def assert_near(found, wanted, atol=1e-9):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= atol


def decoded(lm, ids, states=None, **call):
    """The logits of the last six tokens, one by one after a prompt of eleven.

    A loop may begin at given ``states``.
    """
    logits = []
    cache = None
    for begin, end in pairwise([0, *range(11, 18)]):
        if states is not None:
            lm.model.core.backbone.start = states[:, begin:end]
        with torch.no_grad():
            output = lm(ids[:, begin:end], cache=cache, return_cache=True, **call)
        logits = [*logits, output.logits]
        cache = output.cache
    return torch.cat(logits[1:], dim=1)


@torch.no_grad()
def cached(lm, ids):
    """How many numbers the cache of the core has."""
    return sum(x.numel() for x in lm(ids, return_cache=True).cache.parts[1].tensors())


class TestRavens:
    @RAVENS
    @pytest.mark.parametrize("steps", [1, 3, 8])
    @torch.no_grad()
    def test_a_number_of_iterations(self, name, steps):
        """From given states and from zero, of the solved model and of that of fixed depth."""
        lm = loaded(name)
        fixed = loaded(name, steps)
        golden = numbers(name)
        ids = golden["input_ids"]
        states = golden["initial_state"]
        call = {"solver": NAIVE, "stop": dq.Stop.exactly(steps)}
        first = lm.model.prelude(lm.embed(ids)).value
        assert_near(first, golden["prelude"])
        assert_near(lm.core(first, start=states, **call).value, golden[f"states_r{steps}"])
        for start, name in ((states, "logits"), ("zero", "zero_logits")):
            if f"{name}_r{steps}" in golden:
                assert_near(lm(ids, start=start, **call).logits, golden[f"{name}_r{steps}"])
                assert_near(looped(fixed, ids, start), golden[f"{name}_r{steps}"])

    @RAVENS
    @torch.no_grad()
    def test_a_fixed_depth_begins_at_the_random_states_of_its_authors(self, name):
        """Those of Huginn have its embedding's scale, those of the others their own."""
        lm = loaded(name, 3)
        ids = numbers(name)["input_ids"]
        start = lm.model.core.backbone.start
        assert lm.core is None
        assert start == loaded(name).model.core.solve.start
        std = 0.4**0.5 if name == "huginn" else (2 / (5 * lm.model.d_model)) ** 0.5
        assert start.std == pytest.approx(std)
        torch.manual_seed(0)
        expected = looped(loaded(name, 3), ids, start.draw(lm.embed(ids)))
        torch.manual_seed(0)
        assert torch.equal(lm(ids).logits, expected)

    @torch.no_grad()
    def test_the_two_other_starts_of_the_fork(self):
        lm = loaded("retrofit_olmo")
        golden = numbers("retrofit_olmo")
        ids = golden["input_ids"]
        layers = lm.core.backbone.backbone
        first = lm.model.prelude(lm.embed(ids)).value
        # the first iteration, without the adapter
        skipped, _ = layers(first, layers.prepare(first))
        for name, start, steps in (("embed", "input", 3), ("skip", skipped, 2)):
            output = lm(ids, start=start, solver=NAIVE, stop=dq.Stop.exactly(steps))
            assert_near(output.logits, golden[f"{name}_logits_r3"])

    @RAVENS
    @pytest.mark.parametrize(
        "call",
        [
            {"sweep": dq.Simultaneous()},
            {"sweep": dq.Sliding(4)},
            {"solver": dq.Anderson(), "start": RANDOM},
            {"solver": dq.Broyden(), "start": RANDOM},
            {"solver": NAIVE, "start": RANDOM},
        ],
    )
    @torch.no_grad()
    def test_the_fixed_point_by_every_sweep_and_solver(self, name, call):
        output = loaded(name)(numbers(name)["input_ids"], stop=TIGHT, throw=True, **call)
        assert_near(output.logits, numbers(name)["converged_logits"])

    @RAVENS
    def test_truncated_training(self, name):
        lm = loaded(name).train()
        golden = numbers(name)
        how = {"solver": NAIVE, "stop": dq.Stop.exactly(9), "gradient": dq.Unrolled(last=4)}
        output = lm(
            golden["input_ids"], targets=golden["labels"], start=golden["initial_state"], **how
        )
        output.loss.backward()
        assert_near(output.logits, golden["train_logits"])
        assert_near(output.loss[None], golden["train_loss"])
        # gradients move to our names as weights do
        expected = from_state(config(name), tensors(name, "grad"))
        for theirs, ours in zip(expected.parameters(), lm.parameters(), strict=True):
            assert_near(ours.grad, theirs)

    @RAVENS
    def test_decoding_with_a_cache_per_iteration_or_per_token(self, name):
        fixed = loaded(name, 8)
        golden = numbers(name)
        found = decoded(fixed, golden["input_ids"], golden["initial_state"])
        assert_near(found, golden["decode_logits_r8"])
        fixed.model.core.backbone.start = golden["initial_state"]
        found = decoded(loaded(name), golden["input_ids"], stop=TIGHT, throw=True)
        assert_near(found, golden["decode_logits_converged"])
        assert cached(fixed, golden["input_ids"]) == 8 * cached(loaded(name), golden["input_ids"])

    def test_how_a_core_is_solved_by_default_and_the_norm_that_huginn_uses_twice(self):
        fields = config("huginn") | {"mean_recurrence": 12}
        last = fields.pop("mean_backprop_depth")
        assert loaded("huginn").core.solve.gradient == dq.Unrolled(last=last)
        lm = from_state(fields, tensors("huginn"))
        assert lm.core.solve.stop == dq.Stop.exactly(12)
        assert lm.core.solve.gradient == dq.Unrolled(last=8)
        assert lm.core.eval_solve == dq.SolveConfig(stop=dq.Stop(max_steps=48))
        assert lm.model.norm is lm.model.coda.backbone.norm
        assert lm.head is None


def looped(lm, ids, start):
    """The logits of a model of fixed depth whose loop begins there."""
    lm.model.core.backbone.start = start
    output = lm(ids)
    assert output.stats is None
    return output.logits


class TestOuro:
    @torch.no_grad()
    def test_every_loop(self):
        golden = numbers("ouro")
        assert_near(loaded("ouro")(golden["input_ids"]).logits, golden["eval_logits"])
        for loop in range(4):
            found = loaded("ouro", loop + 1)(golden["input_ids"]).logits
            assert_near(found, golden["loop_logits"][:, :, loop])

    def test_decoding_with_a_cache_per_loop(self):
        golden = numbers("ouro")
        assert_near(decoded(loaded("ouro"), golden["input_ids"]), golden["decode_logits"])

    def test_training_through_all_loops(self):
        lm = loaded("ouro").train()
        ids = numbers("ouro")["input_ids"]
        lm(ids, labels=ids).loss.backward()
        plain = loaded("ouro")
        layers, z = plain.model.backbone.backbone, plain.embed(ids)
        for _ in range(4):
            z = layers(z, layers.prepare(z))[0]
        F.cross_entropy(plain.logits(z)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        for ours, wanted in zip(lm.parameters(), plain.parameters(), strict=True):
            assert_near(ours.grad, wanted.grad)

    def test_the_gate_is_left_out(self):
        """At a threshold of 1 it chooses nothing."""
        lm = loaded("ouro")
        assert not any("gate" in name.replace("gate_proj", "") for name in lm.state_dict())
        without = {n: x for n, x in tensors("ouro").items() if "early_exit_gate" not in n}
        assert len(without) == len(tensors("ouro")) - 2
        again = from_state(config("ouro"), without)
        for one, other in zip(lm.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", [*NAMES, "ouro"])
def test_a_folder_is_loaded(tmp_path, name):
    state = [(key, x.float()) for key, x in tensors(name).items()]
    save_file(dict(state[:7]), tmp_path / "model-a.safetensors")
    save_file(dict(state[7:]), tmp_path / "model-b.safetensors")
    (tmp_path / "config.json").write_text((DATA / f"{name}.json").read_text())
    single = from_pretrained(tmp_path)
    double = from_pretrained(str(tmp_path), torch.float64)
    assert {p.dtype for p in single.parameters()} == {torch.float32}
    assert not single.training
    # the weights can be represented in float32
    for found, wanted in zip(double.parameters(), loaded(name).parameters(), strict=True):
        assert torch.equal(found, wanted)
    assert from_pretrained(tmp_path, steps=2).core is None


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("huginn", {"model_type": "gpt2"}, "model_type.*huginn_raven.*gpt2"),
        ("huginn", {"n_layers_in_coda": 1}, r"Unexpected.*\n?.*transformer\.coda\.1\.attn\.Wqkv"),
        ("huginn", {"head_dim": 10}, r"k_proj\.weight.*\[32, 24\].*\[40, 24\]"),
        ("huginn", {"test_time_noise": 0.1}, "test_time_noise.*0.1"),
        ("retrofit_olmo", {"initial_state_mode": "embed-init"}, "initial_state_mode.*embed-init"),
        ("retrofit_llama", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type.*yarn"),
        ("ouro", {"early_exit_threshold": 0.5}, r"'early_exit_threshold' must be 1\.0, got 0\.5"),
    ],
)
def test_what_is_not_computed_here_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        loaded(name, **changes)


NO_FOLDER = "folder_or_name: there is no folder"


@pytest.mark.parametrize(
    ("content", "arguments", "error", "message"),
    [
        (None, {}, FileNotFoundError, r"config\.json"),
        ("{", {}, ValueError, r"config\.json cannot be read"),
        ('{"model_type": "ouro"}', {}, FileNotFoundError, "safetensors"),
        (None, {"steps": 0}, ValueError, "steps must be an integer >= 1, got 0"),
        (None, {"folder_or_name": Path("none")}, FileNotFoundError, NO_FOLDER),
        (None, {"folder_or_name": "no/such/folder"}, FileNotFoundError, NO_FOLDER),
    ],
)
def test_missing_files_and_bad_arguments_are_named(content, arguments, error, message, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(error, match=message):
        from_pretrained(**{"folder_or_name": tmp_path, **arguments})
