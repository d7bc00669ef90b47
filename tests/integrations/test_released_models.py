"""Released recurrent-depth models give the numbers of their authors' code: iterated, converged, trained, decoded."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import deqseq as dq
from deqseq.integrations.recurrent_depth import from_pretrained, from_state

DATA = Path(__file__).parent / "data"
RAVENS = ("huginn", "retrofit_llama", "retrofit_olmo")
SWEEPS = (dq.Simultaneous(), dq.Chunked(5), dq.Sequential(), dq.Sliding(4))
TIGHT = dq.Stop(rtol=1e-13, max_steps=500)
NAIVE = dq.Naive()


@cache
def numbers(name):
    return load_file(DATA / f"{name}.safetensors")


def config(name):
    return json.loads((DATA / f"{name}.json").read_text())


def weights(name, part="weight"):
    return {key.removeprefix(f"{part}/"): x for key, x in numbers(name).items() if key.startswith(f"{part}/")}


@cache
def loaded(name):
    return from_state(config(name), weights(name))


def assert_near(found, wanted, atol=1e-9):
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= atol


@pytest.mark.parametrize("name", RAVENS)
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_number_of_iterations_from_given_states(name, steps):
    lm, golden = loaded(name), numbers(name)
    with torch.no_grad():
        call = {"start": golden["initial_state"], "solver": NAIVE}
        exactly = lm(golden["input_ids"], stop=dq.Stop.exactly(steps), **call)
        lockstep = lm(golden["input_ids"], sweep=dq.Lockstep(steps), **call)
        first = lm.model.prelude(lm.embed(golden["input_ids"])).value
        states = lm.core(first, stop=dq.Stop.exactly(steps), **call).value
    assert_near(first, golden["prelude"])
    assert_near(states, golden[f"states_r{steps}"])
    assert_near(exactly.logits, golden[f"logits_r{steps}"])
    assert_near(lockstep.logits, golden[f"logits_r{steps}"])
    assert not exactly.converged.any()
    assert not lockstep.converged.any()


@pytest.mark.parametrize("name", RAVENS)
def test_a_number_of_iterations_from_zero(name):
    lm, golden = loaded(name), numbers(name)
    with torch.no_grad():
        for steps in (3, 8):
            output = lm(golden["input_ids"], start="zero", solver=NAIVE, stop=dq.Stop.exactly(steps))
            assert_near(output.logits, golden[f"zero_logits_r{steps}"])


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
    lm, golden = loaded(name), numbers(name)
    call = {"solver": NAIVE, "sweep": dq.Lockstep(8), "return_cache": True}
    found = decoded(lm, golden["input_ids"], golden["initial_state"], **call)
    assert_near(found, golden["decode_logits_r8"])


@pytest.mark.parametrize("name", RAVENS)
def test_decoding_with_one_cache_entry_per_token_is_theirs_at_the_fixed_point(name):
    lm, golden = loaded(name), numbers(name)
    found = decoded(lm, golden["input_ids"], None, stop=TIGHT, return_cache=True, throw=True)
    assert_near(found, golden["decode_logits_converged"])


def decoded(lm, ids, start, **call):
    """The logits of the last six tokens, one by one after a prompt of eleven."""

    def part(begin, end):
        return {} if start is None else {"start": start[:, begin:end]}

    logits = []
    with torch.no_grad():
        cache = lm(ids[:, :11], **call, **part(0, 11)).cache
        for t in range(11, 17):
            output = lm(ids[:, t : t + 1], cache=cache, **call, **part(t, t + 1))
            logits, cache = [*logits, output.logits], output.cache
    return torch.cat(logits, dim=1)


def test_the_cache_of_a_fixed_point_is_that_of_one_iteration():
    """What one entry per token saves: Huginn's code keeps the core's keys and values of every iteration."""
    lm, ids = loaded("huginn"), numbers("huginn")["input_ids"]
    with torch.no_grad():
        solved = lm(ids, stop=TIGHT, return_cache=True).cache
        stepped = lm(ids, solver=NAIVE, sweep=dq.Lockstep(8), return_cache=True).cache
    sizes = [sum(x.numel() for x in cache.core.tensors()) for cache in (solved, stepped)]
    assert sizes[1] == 8 * sizes[0]


# Ouro


def test_every_loop_of_ouro():
    lm, golden = loaded("ouro"), numbers("ouro")
    with torch.no_grad():
        assert_near(lm(golden["input_ids"]).logits, golden["eval_logits"])
        for loop in range(4):
            found = lm(golden["input_ids"], sweep=dq.Lockstep(loop + 1)).logits
            assert_near(found, golden["loop_logits"][:, :, loop])


def test_ouro_decodes_with_a_cache_per_loop():
    lm, golden = loaded("ouro"), numbers("ouro")
    assert_near(decoded(lm, golden["input_ids"], None, return_cache=True), golden["decode_logits"])
    generated = lm.generate(golden["input_ids"][:, :11], max_new_tokens=6).tokens
    ids = golden["input_ids"][:, :11]
    for _ in range(6):  # without a cache
        with torch.no_grad():
            ids = torch.cat([ids, lm(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generated, ids[:, 11:])


def test_ouro_trains_through_all_loops():
    """The published loss weighs the loops by the gate; the last loop alone has this gradient."""
    lm, golden = from_state(config("ouro"), weights("ouro")).train(), numbers("ouro")
    ids = golden["input_ids"]
    lm(ids, labels=ids).loss.backward()
    plain = from_state(config("ouro"), weights("ouro"))
    x = plain.embed(ids)
    layers = plain.model.backbone
    for _ in range(4):
        x, _ = layers(x, layers.prepare(x))
    logits = plain.logits(x)[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    wanted = dict(plain.named_parameters())
    for key, parameter in lm.named_parameters():
        if parameter.requires_grad:
            assert_near(parameter.grad, wanted[key].grad)
    assert [key for key, parameter in lm.named_parameters() if not parameter.requires_grad] == [
        "exit_gate.weight",
        "exit_gate.bias",
    ]


@pytest.mark.parametrize("threshold", [0.5, 0.8, 1.0])
def test_ouro_exits_by_its_gate(threshold):
    lm, golden = loaded("ouro"), numbers("ouro")
    with torch.no_grad():
        output = lm(golden["input_ids"], stop=dq.Stop(exit=dq.ExitGate(lm.exit_gate, threshold)))
    name = "eval_logits" if threshold == 1 else f"threshold_{threshold}_logits"
    assert_near(output.logits, golden[name])
    reached = golden["exit_pdf"].cumsum(dim=2)[..., :3] >= threshold  # the last loop ends in any case
    loops = 1 + (~reached).cumprod(dim=2).sum(dim=2)
    assert torch.equal(output.stats.iterations, loops)
    assert output.stats.evaluations == 4
    assert threshold == 1 or len(loops.unique()) > 1


def test_the_probabilities_of_ouros_gate():
    lm, golden = loaded("ouro"), numbers("ouro")
    assert_near(lm.exit_gate(golden["states"])[..., 0].detach(), golden["gate_logits"])
    rule, stays, memory = dq.ExitGate(lm.exit_gate, 0.5), [torch.ones(3, 17).double()], None
    with torch.no_grad():
        for loop in range(3):
            _, memory = rule.step(golden["states"][:, :, loop], None, memory)
            stays.append(memory)
    stays.append(torch.zeros(3, 17).double())
    assert_near(torch.stack(stays, dim=2).diff(dim=2).neg(), golden["exit_pdf"])


def test_ouro_decodes_and_exits_with_a_cache_per_loop():
    lm, golden = loaded("ouro"), numbers("ouro")
    stop = dq.Stop(exit=dq.ExitGate(lm.exit_gate, 0.5))
    found = decoded(lm, golden["input_ids"], None, stop=stop, return_cache=True)
    assert_near(found, golden["threshold_0.5_logits"][:, 11:])
    assert lm.generate(golden["input_ids"], max_new_tokens=3, stop=stop).tokens.shape == (3, 3)


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
        exactly = {"solver": NAIVE, "sweep": dq.Lockstep(3)}
        assert_near(single(ids, **exactly).logits.double(), double(ids, **exactly).logits, 1e-4)


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
    with pytest.raises(TypeError, match="state"):
        from_state(config("ouro"), [])
    state = weights("huginn")
    del state["transformer.ln_f.weight"]
    with pytest.raises(ValueError, match=r"missing.*coda.backbone.norm"):
        from_state(config("huginn"), state)
