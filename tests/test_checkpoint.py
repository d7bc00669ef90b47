"""What a checkpoint brings back, bit for bit."""

import json
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from deqseq.training import Curriculum, bounded, free, load_latest, parameter_groups, save_checkpoint
from deqseq.training.trees import joined, split

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def made(dropout: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(dropout), nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=0.1, betas=(0.9, 0.95))
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)


def train(steps: int, model, optimizer, scheduler) -> list[str]:
    losses = []
    for _ in range(steps):
        # Python's generator is left to test_restart: the checks of types in these tests draw from it
        noise = torch.rand(2, 3) + numpy.random.rand()
        optimizer.zero_grad()
        loss = (model(noise) - 1).square().sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item().hex())
    return losses


def same(one: object, other: object) -> bool:
    """Equal in values, types, order and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and bytes(
            one.detach().contiguous().view(-1).view(torch.uint8).tolist() if one.numel() else ()
        ) == (bytes(other.detach().contiguous().view(-1).view(torch.uint8).tolist() if other.numel() else ()))
    if isinstance(one, dict):
        assert isinstance(other, dict)
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        assert isinstance(other, list | tuple)
        return len(one) == len(other) and all(same(mine, yours) for mine, yours in zip(one, other, strict=True))
    return one == other or (one != one and other != other)


def seeded() -> None:
    torch.manual_seed(0)
    numpy.random.seed(0)


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path):
    seeded()
    parts = made(dropout=0.5)
    whole = train(9, *parts)
    seeded()
    first = made(dropout=0.5)
    begun = train(4, *first)
    curriculum = Curriculum((bounded(until=3), free()), "steps")
    position = {"epoch": 1, "order": torch.tensor([2, 0, 1])}
    path = save_checkpoint(
        tmp_path, 4, *first[:2], {"seconds": 1.5}, scheduler=first[2], position=position, phase=curriculum.record(4)
    )
    assert path == tmp_path / "checkpoint-00000004"
    train(2, *first)  # moves every generator on
    saved = load_latest(tmp_path)
    assert (saved.step, saved.meta, saved.path) == (4, {"seconds": 1.5}, path)
    assert same(saved.position, position)
    assert curriculum.resumed(saved.phase).name == "free"
    again = made(dropout=0.5)
    saved.restore(*again)
    assert begun + train(5, *again) == whole
    assert same(again[0].state_dict(), parts[0].state_dict())
    assert same(again[1].state_dict(), parts[1].state_dict())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_of_any_dtype_comes_back(tmp_path, dtype):
    numbers = (torch.arange(6).reshape(2, 3) % 3).to(dtype)
    kept = {"one": numbers.t(), "scalar": numbers[0, 2], "none": numbers[:0], "part": numbers[1]}
    state = {
        "state": {0: kept, 7: {"step": 3, "buffer": None, "rms": 0.1}},
        "param_groups": [{"betas": (0.9, 0.95)}] * 2,
    }
    save_checkpoint(tmp_path, 0, {"weight": numbers, "half": numbers[:, 1:]}, state)
    saved = load_latest(tmp_path)
    assert same(saved.model, {"half": numbers[:, 1:].contiguous(), "weight": numbers})
    assert same(saved.optimizer["state"][0]["one"], numbers.t().contiguous())
    assert same(saved.optimizer, state)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adafactor])
def test_other_optimizers_and_groups(tmp_path, make):
    seeded()
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": torch.tensor(0.2), "named": "bias"}]
    optimizer = make(groups)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path, 1, model, optimizer)
    assert same(load_latest(tmp_path).optimizer, optimizer.state_dict())


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    hf = pytest.importorskip("deqseq.integrations.huggingface")
    config = hf.ImplicitLlamaConfig(
        vocab_size=5, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=4
    )
    model = hf.ImplicitLlamaForCausalLM(config)
    path = save_checkpoint(tmp_path, 1, model, torch.optim.AdamW(model.parameters()))
    assert ("lm_head.weight" in load_file(path / "model.safetensors")) != (
        "model.embed_tokens.weight" in load_file(path / "model.safetensors")
    )
    saved = load_latest(tmp_path)
    assert saved.model.keys() == model.state_dict().keys()
    assert all(same(saved.model[name], tensor) for name, tensor in model.state_dict().items())
    assert saved.model["lm_head.weight"] is saved.model["model.embed_tokens.weight"]


def test_a_conjugate_is_written_as_its_numbers(tmp_path):
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    save_checkpoint(tmp_path, 1, {"a": numbers, "b": numbers.conj(), "c": numbers.conj().imag}, {"state": {}})
    saved = load_latest(tmp_path).model
    assert saved["a"].tolist() == [1 + 2j, 3 - 1j]
    assert saved["b"].tolist() == [1 - 2j, 3 + 1j]
    assert saved["c"].tolist() == [-2, 1]


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"$tensor": 1, "a": {"$tuple": []}},
        {0: [], None: (), True: ((),), 1.5: "x"},
        {1: torch.zeros(2), "1": torch.ones(3)},
        {"inf": float("inf"), "nan": float("nan"), "tiny": 5e-324, "large": 2**70, "text": "é\n\0"},
        {"deep": [{"a": (torch.zeros(()), [torch.ones(0, 3)])}]},
    ],
    ids=str,
)
def test_nests_come_back_through_json(tree):
    data, tensors = split(tree, "mine")
    assert same(joined(json.loads(json.dumps(data)), tensors), tree)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"a": [1, {2}]}, r"a checkpoint cannot hold training.meta.a.1, a set: \{2\}"),
        ({"a": {"b": numpy.float64(1)}}, r"a checkpoint cannot hold training.meta.a.b, a float64"),
        ({"a": {torch.device("cpu"): 1}}, r"a checkpoint cannot hold training.meta.a: key device.*, a device"),
    ],
)
def test_what_cannot_be_held_is_named_before_anything_is_written(tmp_path, meta, message):
    with pytest.raises(TypeError, match=message):
        save_checkpoint(tmp_path / "new", 1, *made()[:2], meta)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": torch.zeros(2, device="meta")}, "a is a tensor on the meta device: only whole tensors can be written"),
        ({"a": torch.zeros(2).to_sparse()}, "a is a torch.sparse_coo tensor of torch.float32: safetensors cannot"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "a is a torch.strided tensor of torch.complex128"),
    ],
    ids=["meta", "sparse", "complex128"],
)
def test_weights_that_cannot_be_held(tmp_path, weights, message):
    with pytest.raises(TypeError, match=message):
        save_checkpoint(tmp_path, 1, weights, {"state": {}})
    assert list(tmp_path.iterdir()) == []


def test_part_of_a_sharded_model_is_refused(tmp_path):
    from torch.distributed.tensor import DTensor, init_device_mesh

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        part = DTensor.from_local(torch.zeros(2), init_device_mesh("cpu", (1,)))
        with pytest.raises(
            TypeError, match=r"a is a DTensor: only whole tensors can be written; gather a sharded model"
        ):
            save_checkpoint(tmp_path, 1, {"a": part}, {"state": {}})
        with pytest.raises(TypeError, match=r"training.optimizer.state.0 is a DTensor"):
            save_checkpoint(tmp_path, 1, {}, {"state": {0: part}})
    finally:
        torch.distributed.destroy_process_group()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [({"step": -1}, "step must be an integer >= 0, got -1"), ({"keep": 0}, "keep must be an integer >= 1, got 0")],
)
def test_bad_numbers_are_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        save_checkpoint(tmp_path, **({"step": 1, "model": made()[0], "optimizer": made()[1]} | change))


def test_a_scheduler_is_there_twice_or_not_at_all(tmp_path):
    model, optimizer, scheduler = made()
    save_checkpoint(tmp_path, 1, model, optimizer)
    with pytest.raises(ValueError, match=r"checkpoint-00000001 holds no scheduler's state, and a scheduler was given"):
        load_latest(tmp_path).restore(model, optimizer, scheduler)
    save_checkpoint(tmp_path, 2, model, optimizer, scheduler=scheduler)
    with pytest.raises(ValueError, match=r"checkpoint-00000002 holds a scheduler's state, and no scheduler was given"):
        load_latest(tmp_path).restore(model, optimizer)


def test_numpy_is_known_only_where_it_is_loaded(tmp_path, monkeypatch):
    model, optimizer, _ = made()
    monkeypatch.setattr(sys.modules["deqseq.training.random_state"], "sys", SimpleNamespace(modules={}))
    save_checkpoint(tmp_path, 1, model, optimizer)
    numpy.random.seed(5)
    saved = load_latest(tmp_path)
    assert saved.random["numpy"] is None
    saved.restore(model, optimizer)
    drawn = numpy.random.rand()
    numpy.random.seed(5)
    assert numpy.random.rand() == drawn


def test_extra_state_that_is_no_tensor_is_refused(tmp_path):
    class Counting(nn.Linear):
        def get_extra_state(self):
            return 3

    model = Counting(1, 1)
    with pytest.raises(TypeError, match=r"a checkpoint cannot hold _extra_state of the model, a int"):
        save_checkpoint(tmp_path, 1, model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, value):
    model, optimizer, _ = made()
    with torch.no_grad():
        model[0].bias[1] = value
    with pytest.raises(
        FloatingPointError, match=r"after step 2 are not finite \(0.bias\): .* no checkpoint has been wr"
    ):
        save_checkpoint(tmp_path, 2, model, optimizer)
    save_checkpoint(tmp_path, 1, *made()[:2])
    with pytest.raises(FloatingPointError, match=r"the last good one is .*checkpoint-00000001"):
        save_checkpoint(tmp_path, 2, model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001"]


def test_safetensors_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r'checkpoints need safetensors: pip install "deqseq\[examples\]"'):
        save_checkpoint(tmp_path, 1, *made()[:2])
    with pytest.raises(ImportError, match=r"checkpoints need safetensors"):
        load_latest(tmp_path)
    assert list(tmp_path.iterdir()) == []
