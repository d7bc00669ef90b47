"""Losses, gradients, recomputed activations and vocabularies of every family; adapters."""

import copy

import pytest
import torch
from hf_models import EVERY, FAMILIES, IDS, LEFT, configured, made
from torch import nn
from torch.nn import functional as F

import deqseq as dq
from deqseq.integrations.huggingface import DeqseqForCausalLM, to_causal_lm

NORMALISED = {"backbone": {"weight_norm": True}}


def gradients(model, **options) -> dict:
    model.zero_grad()
    model(IDS, labels=IDS, **options).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


class TestLoss:
    @EVERY
    def test_loss_and_gradients_are_those_of_the_core(self, kind):
        model = made(kind, embedding_dropout=0.5).train()
        torch.manual_seed(1)
        mine = gradients(model)
        model.zero_grad()
        torch.manual_seed(1)
        to_causal_lm(model)(IDS, labels=IDS).loss.backward()
        compared = 0
        for name, parameter in model.named_parameters():
            assert (mine[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name
            compared += parameter.grad.norm().item() > 1e-6
        assert compared > 15
        assert not torch.equal(model(IDS).logits, model(IDS).logits)  # embedded tokens are dropped

    @torch.no_grad()
    def test_which_labels_count(self):
        """As in transformers, all that are not -100, after padding on the left, too."""
        model, labels = made("llama"), IDS.masked_fill(~LEFT, -100)
        labels[0, 3] = -100
        output = model(IDS, labels=labels, attention_mask=LEFT.long())
        each = F.cross_entropy(
            output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
        )
        assert (labels[:, 1:] != -100).sum() == 11
        assert abs(output.loss.item() - each.sum().item() / 11) < 1e-5
        parted = model(
            IDS, labels=labels, attention_mask=LEFT.long(), num_items_in_batch=torch.tensor(22)
        ).loss
        assert abs(parted.item() - output.loss.item() / 2) < 1e-5
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
        assert model(IDS, shift_labels=shifted, attention_mask=LEFT.long()).loss == output.loss

    def test_a_part_of_a_batch_may_have_nothing_to_score(self):
        model, nothing = made("mamba2").train(), torch.full_like(IDS, -100)
        loss = model(IDS, labels=nothing, num_items_in_batch=torch.tensor(5)).loss
        loss.backward()
        assert loss == 0
        with pytest.raises(ValueError, match="labels leave nothing to score"):
            model(IDS, labels=nothing, num_items_in_batch=0)

    def test_the_trainer_leaves_out_what_it_cannot_gather(self):
        model = made("mamba2")
        output = model(IDS, labels=IDS)
        assert [
            name for name in output if name not in model.config.keys_to_ignore_at_inference
        ] == ["loss", "logits"]
        assert model.accepts_loss_kwargs


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {}) for kind in FAMILIES),
        *((kind, {"backbone": {"weight_norm": True}}) for kind in ("mamba2", "explicit")),
    ],
)
def test_every_activation_is_recomputed_once(kind, fields):
    model = made(kind, **fields).train()
    plain, calls = gradients(model), {}
    for name, layer in model.model.core.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith(("mixer.in_proj", "q_proj")):
            calls[name] = 0

            def count(*_, name=name):
                calls[name] += torch.is_grad_enabled()

            layer.register_forward_hook(count)
    gradients(model)
    once = dict(calls)
    model.activation_checkpointing_enable({"use_reentrant": False})
    again = gradients(model)
    # of a solve, the first evaluation has no gradient to recompute for
    assert once
    assert all(calls[name] - once[name] == 2 * count - (count > 2) for name, count in once.items())
    for name, gradient in plain.items():
        assert (again[name] - gradient).abs().max() < 1e-10, name
    model.activation_checkpointing_disable()
    gradients(model)
    assert all(calls[name] == 4 * count - (count > 2) for name, count in once.items())


@EVERY
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_resize_token_embeddings(kind, tied):
    model = made(kind, tie_word_embeddings=tied)
    before = model(IDS).logits
    model.resize_token_embeddings(200, mean_resizing=False)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert (model.config.vocab_size, model(IDS).logits.shape) == (200, (3, 7, 200))
    assert (
        model(IDS).logits[..., :13] - before
    ).abs().max() < 1e-12  # a wider product rounds in another order
    for weight in {model.lm_head.weight, model.model.embed_tokens.weight}:
        assert abs(weight[13:].std().item() / 0.5 - 1) < 0.1
    assert model(IDS + 150).logits.isfinite().all()
    model.resize_token_embeddings(13)
    assert torch.equal(model(IDS).logits, before)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning", "ignore::UserWarning:peft"
)
@pytest.mark.parametrize(
    ("kind", "targets", "options"),
    [
        ("mamba2", ["in_proj", "out_proj"], {}),
        ("llama", ["q_proj", "o_proj"], {"init_lora_weights": "pissa"}),
        ("llama", ["q_proj", "o_proj"], {"trainable_token_indices": [1, 2]}),
        ("decoder", ["q_proj", "o_proj"], {}),
        ("parts", ["in_proj", "o_proj", "embed_tokens", "lm_head"], {}),
    ],
)
def test_an_adapter_begins_as_the_model_learns_generates_and_merges(
    kind, targets, options, tmp_path
):
    peft = pytest.importorskip("peft")
    fields = (
        {"backbone": {"weight_norm": True}}
        if kind in ("mamba2", "llama")
        else {"tie_word_embeddings": "lm_head" not in targets}
    )
    model = made(kind, solve={"stop": {"rtol": 1e-6}}, **fields).float()
    model.fold_weight_norm()
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets, **options)
    lora, before = peft.get_peft_model(copy.deepcopy(model), config), model(IDS).logits
    assert (lora.eval()(IDS).logits - before).abs().max() < 1e-4
    optimizer = torch.optim.SGD(
        [weight for weight in lora.parameters() if weight.requires_grad], lr=0.05
    )
    for _ in range(2):
        lora.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = lora.eval()(IDS).logits
    assert (wanted - before).abs().max() > 1e-3
    assert lora.generate(input_ids=IDS, max_new_tokens=2, do_sample=False).shape == (3, 9)
    merged = lora.merge_and_unload()
    assert (merged(IDS).logits - wanted).abs().max() < 1e-4
    merged.save_pretrained(tmp_path)
    again = copy.deepcopy(type(model).from_pretrained(tmp_path))
    assert (again(IDS).logits - wanted).abs().max() < 1e-4


@pytest.mark.filterwarnings(
    "ignore::UserWarning:peft", "ignore:`is_gradient_checkpointing`:FutureWarning"
)
@pytest.mark.parametrize(
    ("kind", "core"), [("mamba2", False), ("llama", False), ("decoder", False), ("decoder", True)]
)
def test_an_adapter_with_dropout_is_refused_in_training(kind, core):
    peft = pytest.importorskip("peft")
    targets = ["in_proj"] if kind == "mamba2" else ["q_proj"]
    options = {"target_modules": targets}
    for config in (
        peft.LoraConfig(lora_dropout=0.1, **options),
        peft.LoKrConfig(rank_dropout=0.1, **options),
        peft.OFTConfig(module_dropout=0.1, oft_block_size=4, **options),
    ):
        model = made(kind, solve={"stop": {"rtol": 1e-4}}).float()
        adapted = peft.get_peft_model(to_causal_lm(model) if core else model, config)
        with pytest.raises(ValueError, match="must have no dropout"):
            adapted.train()(IDS, labels=IDS)
        assert adapted.eval()(IDS).converged.all()


@pytest.mark.filterwarnings(
    "ignore::UserWarning:peft", "ignore:`is_gradient_checkpointing`:FutureWarning"
)
def test_an_injection_is_trained_with_an_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    fresh = DeqseqForCausalLM(configured("decoder", solve={"stop": dq.Stop.exactly(3)}))
    options = {"target_modules": "all-linear", "modules_to_save": ["injection"]}
    model = peft.get_peft_model(
        fresh, peft.LoraConfig(task_type="CAUSAL_LM", r=2, **options)
    ).train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    torch.optim.SGD(
        [weight for weight in model.parameters() if weight.requires_grad], lr=0.05
    ).step()
    once, wanted = (model.eval()(IDS, solve={"stop": dq.Stop.exactly(n)}).logits for n in (1, 3))
    assert (once - wanted).abs().max() > 1e-4
    model.save_pretrained(tmp_path)
    base = model.unload()
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(again.eval()(IDS).logits, wanted)
