"""Released recurrent-depth models give the numbers of their authors' code: iterated, converged, trained, decoded."""

from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from released import DATA, assert_near, config, decoded, loaded, numbers, weights
from safetensors.torch import save_file
from small_models import Logits

import deqseq as dq
from deqseq.integrations.recurrent_depth import from_pretrained, from_state

RAVENS = ("huginn", "retrofit_llama", "retrofit_olmo")
SWEEPS = (dq.Simultaneous(), dq.Chunked(5), dq.Sequential(), dq.Sliding(4))
TIGHT = dq.Stop(rtol=1e-13, max_steps=500)
NAIVE = dq.Naive()


@contextmanager
def started(lm, start):
    """The loop of a model of fixed depth begins there."""
    looped = lm.model.core.backbone
    before, looped.start = looped.start, start
    try:
        yield lm
    finally:
        looped.start = before


@pytest.mark.parametrize("name", RAVENS)
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_number_of_iterations_from_given_states(name, steps):
    lm, golden = loaded(name), numbers(name)
    with torch.no_grad(), started(loaded(name, steps), golden["initial_state"]) as fixed:
        call = {"start": golden["initial_state"], "solver": NAIVE}
        exactly = lm(golden["input_ids"], stop=dq.Stop.exactly(steps), **call)
        looped = fixed(golden["input_ids"])
        first = lm.model.prelude(lm.embed(golden["input_ids"])).value
        states = lm.core(first, stop=dq.Stop.exactly(steps), **call).value
    assert_near(first, golden["prelude"])
    assert_near(states, golden[f"states_r{steps}"])
    assert_near(exactly.logits, golden[f"logits_r{steps}"])
    assert_near(looped.logits, golden[f"logits_r{steps}"])
    assert not exactly.converged.any()
    assert looped.stats is None


@pytest.mark.parametrize("name", RAVENS)
def test_a_number_of_iterations_from_zero(name):
    lm, golden = loaded(name), numbers(name)
    for steps in (3, 8):
        with torch.no_grad(), started(loaded(name, steps), "zero") as fixed:
            solved = lm(golden["input_ids"], start="zero", solver=NAIVE, stop=dq.Stop.exactly(steps))
            assert_near(solved.logits, golden[f"zero_logits_r{steps}"])
            assert_near(fixed(golden["input_ids"]).logits, golden[f"zero_logits_r{steps}"])


@pytest.mark.parametrize(("name", "std"), [("huginn", 0.4**0.5), ("retrofit_llama", None), ("retrofit_olmo", None)])
def test_a_fixed_depth_begins_at_the_random_states_of_its_authors(name, std):
    """Those of Huginn have its embedding's scale, those of the others their own."""
    lm = loaded(name, 3)
    assert lm.core is None
    start = lm.model.core.backbone.start
    assert start == loaded(name).model.core.solve.start
    assert start.std == pytest.approx(std or (2 / (5 * lm.model.d_model)) ** 0.5)
    torch.manual_seed(0)
    states = start.draw(lm.embed(numbers(name)["input_ids"]))
    with torch.no_grad(), started(lm, states):
        expected = lm(numbers(name)["input_ids"]).logits
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(lm(numbers(name)["input_ids"]).logits, expected)


def test_the_two_other_starts_of_the_fork():
    lm, golden = loaded("retrofit_olmo"), numbers("retrofit_olmo")
    ids = golden["input_ids"]
    with torch.no_grad():
        embedded = lm(ids, start="input", solver=NAIVE, stop=dq.Stop.exactly(3))
        first = lm.model.prelude(lm.embed(ids)).value
        layers = lm.core.backbone.backbone
        skipped, _ = layers(first, layers.prepare(first))  # the first iteration, without the adapter
        output = lm(ids, start=skipped, solver=NAIVE, stop=dq.Stop.exactly(2))
    assert_near(embedded.logits, golden["embed_logits_r3"])
    assert_near(output.logits, golden["skip_logits_r3"])


@pytest.mark.parametrize("name", RAVENS)
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_the_fixed_point_by_every_sweep(name, sweep):
    lm, golden = loaded(name), numbers(name)
    with torch.no_grad():
        output = lm(golden["input_ids"], sweep=sweep, stop=TIGHT, throw=True)
    assert_near(output.logits, golden["converged_logits"])


@pytest.mark.parametrize("name", RAVENS)
@pytest.mark.parametrize("solver", [dq.Anderson(), dq.Broyden(), NAIVE], ids=str)
def test_the_fixed_point_by_every_solver_and_from_random_states(name, solver):
    lm, golden = loaded(name), numbers(name)
    with torch.no_grad():
        output = lm(golden["input_ids"], solver=solver, start=dq.RandomStart(0.5, seed=1), stop=TIGHT, throw=True)
    assert_near(output.logits, golden["converged_logits"])


@pytest.mark.parametrize("name", RAVENS)
def test_truncated_training(name):
    lm, golden = from_state(config(name), weights(name)).train(), numbers(name)
    how = {"solver": NAIVE, "stop": dq.Stop.exactly(9), "gradient": dq.Unrolled(last=4)}
    output = lm(golden["input_ids"], targets=golden["labels"], start=golden["initial_state"], **how)
    output.loss.backward()
    assert_near(output.logits, golden["train_logits"])
    assert_near(output.loss[None], golden["train_loss"])
    expected = from_state(config(name), weights(name, "grad"))  # gradients move to our names as weights do
    wanted = dict(expected.named_parameters())
    for key, parameter in lm.named_parameters():
        assert_near(parameter.grad, wanted[key])


@pytest.mark.parametrize("name", RAVENS)
def test_decoding_with_a_cache_per_iteration_is_theirs(name):
    lm, golden = loaded(name, 8), numbers(name)
    states = golden["initial_state"]
    with started(lm, states):
        found = decoded(lm, golden["input_ids"], states)
    assert_near(found, golden["decode_logits_r8"])


@pytest.mark.parametrize("name", RAVENS)
def test_decoding_with_one_cache_entry_per_token_is_theirs_at_the_fixed_point(name):
    lm, golden = loaded(name), numbers(name)
    found = decoded(lm, golden["input_ids"], stop=TIGHT, throw=True)
    assert_near(found, golden["decode_logits_converged"])


def test_the_cache_of_a_fixed_point_is_that_of_one_iteration():
    """What one entry per token saves: Huginn's code keeps the core's keys and values of every iteration."""
    ids = numbers("huginn")["input_ids"]
    with torch.no_grad():
        caches = [loaded("huginn", steps)(ids, return_cache=True).cache for steps in (None, 8)]
    sizes = [sum(x.numel() for x in cache.core.tensors()) for cache in caches]
    assert sizes[1] == 8 * sizes[0]


@pytest.mark.filterwarnings("ignore")
def test_a_fixed_depth_is_exported():
    lm, ids = loaded("huginn", 3), numbers("huginn")["input_ids"]
    with torch.no_grad():
        exported = torch.export.export(Logits(lm), (ids,), strict=False).module()
        torch.manual_seed(1)
        expected = lm(ids).logits
        torch.manual_seed(1)
        assert_near(exported(ids), expected, 1e-12)


# files


@pytest.mark.parametrize("name", [*RAVENS, "ouro"])
def test_a_folder_is_loaded(tmp_path, name):
    state = weights(name)
    parts = {"a": dict(list(state.items())[:7]), "b": dict(list(state.items())[7:])}
    for part, tensors in parts.items():
        save_file({key: x.float() for key, x in tensors.items()}, tmp_path / f"model-{part}.safetensors")
    (tmp_path / "config.json").write_text((DATA / f"{name}.json").read_text())
    single, double = from_pretrained(tmp_path), from_pretrained(str(tmp_path), torch.float64)
    assert {p.dtype for p in single.parameters()} == {torch.float32}
    assert not single.training
    for key, tensor in loaded(name).state_dict().items():  # the weights can be represented in float32
        assert torch.equal(double.state_dict()[key], tensor)
    ids = numbers(name)["input_ids"]
    with torch.no_grad():
        exactly = {} if name == "ouro" else {"solver": NAIVE, "stop": dq.Stop.exactly(3)}
        assert_near(single(ids, **exactly).logits.double(), double(ids, **exactly).logits, 1e-4)
    assert from_pretrained(tmp_path, steps=2).core is None


def test_the_norm_that_huginn_uses_twice_is_one_parameter():
    lm = from_state(config("huginn"), weights("huginn"))
    assert lm.model.norm is lm.model.coda.backbone.norm
    assert lm.head is None


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("huginn", {"model_type": "gpt2"}, ["model_type", "gpt2", "huginn_raven"]),
        ("huginn", {"injection_type": "add"}, ["injection_type", "add"]),
        ("huginn", {"n_embd": "24"}, ["n_embd", "integer"]),
        ("huginn", {"n_layers_in_coda": 1}, ["unexpected", "model.coda.backbone.layers.1"]),
        ("huginn", {"intermediate_size": 48}, ["of another shape", "model.prelude.backbone.layers.0.mlp.up_proj"]),
        ("huginn", {"test_time_noise": 0.1}, ["test_time_noise", "0.1"]),
        ("retrofit_olmo", {"initial_state_mode": "embed-init"}, ["initial_state_mode", "start='input'"]),
        ("retrofit_llama", {"rope_scaling": {"rope_type": "yarn"}}, ["rope_type", "yarn"]),
        ("retrofit_olmo", {"init_values": None}, ["init_values", "None"]),
        ("huginn", {"head_dim": 10}, ["of another shape", "q_proj.weight (72, 24) instead of (40, 24)"]),
        ("ouro", {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ("ouro", {"use_sliding_window": True}, ["use_sliding_window"]),
        ("ouro", {"early_exit_threshold": -0.5}, ["early_exit_threshold", "-0.5", ">= 0"]),
    ],
)
def test_what_is_not_computed_here_is_refused(name, changes, words):
    with pytest.raises(ValueError) as caught:
        from_state(config(name) | changes, weights(name))
    assert all(word in str(caught.value) for word in words)


def test_a_missing_folder_is_no_name_on_the_hub(tmp_path):
    for folder in (str(tmp_path / "none"), Path("none"), "./none", "no/such/folder"):
        with pytest.raises(FileNotFoundError, match="folder_or_name: there is no folder"):
            from_pretrained(folder)


@pytest.mark.usefixtures("unchecked")
def test_missing_files_and_wrong_types(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        from_pretrained(tmp_path)
    wrong = {"{": r"config\.json is no JSON", '{"model_type": ["ouro"]}': r"'model_type' cannot be \['ouro'\]"}
    for text, words in wrong.items():
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "ouro"}')
    with pytest.raises(FileNotFoundError, match="safetensors"):
        from_pretrained(tmp_path)
    with pytest.raises(TypeError, match="dtype"):
        from_pretrained(tmp_path, "bfloat16")
    with pytest.raises(ValueError, match=r"dtype must be a floating-point type, got torch\.int8"):
        from_pretrained(tmp_path, torch.int8)
    with pytest.raises(TypeError, match="folder_or_name"):
        from_pretrained(None)
    for load in (partial(from_pretrained, tmp_path), partial(from_state, config("ouro"), weights("ouro"))):
        with pytest.raises(ValueError, match="steps must be an integer >= 1, got 0"):
            load(steps=0)
    with pytest.raises(TypeError, match="state"):
        from_state(config("ouro"), [])
    state = weights("huginn")
    del state["transformer.ln_f.weight"]
    with pytest.raises(ValueError, match=r"missing.*coda.backbone.norm"):
        from_state(config("huginn"), state)
