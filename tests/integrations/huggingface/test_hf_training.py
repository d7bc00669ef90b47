"""Losses, gradients, recomputed activations and vocabularies of every family; adapters."""

import copy

import pytest
import torch
from hf_models import EVERY, FAMILIES, IDS, LEFT, close, configured, made
from torch import nn
from torch.nn import functional as F

import deqseq as dq
from deqseq.integrations.huggingface import DeqseqForCausalLM, to_causal_lm

NORMALISED = {"backbone": {"weight_norm": True}}
OF_PEFT = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning", "ignore::UserWarning:peft"
)


def gradients(model, **options):
    model.zero_grad()
    model(IDS, labels=IDS, **options).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def step(model):
    """One step of gradient descent."""
    model(input_ids=IDS, labels=IDS).loss.backward()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    torch.optim.SGD(weights, lr=0.05).step()
    model.zero_grad()


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
        model = made("llama")
        labels = IDS.masked_fill(~LEFT, -100)
        labels[0, 3] = -100
        call = {"input_ids": IDS, "attention_mask": LEFT.long()}
        output = model(labels=labels, **call)
        logits = output.logits[:, :-1].flatten(0, 1)
        scored = labels[:, 1:].flatten()
        each = F.cross_entropy(logits, scored, reduction="none")
        assert (scored != -100).sum() == 11
        close(output.loss, each.sum() / 11, 1e-5)
        half = model(labels=labels, num_items_in_batch=torch.tensor(22), **call).loss
        close(half, output.loss / 2, 1e-5)
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
        assert model(shift_labels=shifted, **call).loss == output.loss

    def test_a_part_of_a_batch_may_have_nothing_to_score(self):
        model = made("mamba2").train()
        nothing = torch.full_like(IDS, -100)
        loss = model(IDS, labels=nothing, num_items_in_batch=torch.tensor(5)).loss
        loss.backward()
        assert loss == 0
        with pytest.raises(ValueError, match="labels leave nothing to score"):
            model(IDS, labels=nothing)
        for items in (0, torch.tensor(0), -1, "5", torch.ones(2)):
            with pytest.raises(
                (ValueError, TypeError), match="num_items_in_batch must be a number"
            ):
                model(IDS, labels=IDS, num_items_in_batch=items)

    def test_the_trainer_leaves_out_what_it_cannot_gather(self):
        model = made("mamba2")
        output = model(IDS, labels=IDS)
        assert output.keys() - {*model.config.keys_to_ignore_at_inference} == {"loss", "logits"}
        assert model.accepts_loss_kwargs


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {}) for kind in FAMILIES),
        *((kind, NORMALISED) for kind in ("mamba2", "explicit")),
    ],
)
def test_every_activation_is_recomputed_once(kind, fields):
    model = made(kind, **fields).train()
    plain = gradients(model)
    calls = {}
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
        close(again[name], gradient, 1e-10)
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
    assert model.config.vocab_size == 200
    assert model(IDS).logits.shape == (3, 7, 200)
    close(model(IDS).logits[..., :13], before)  # a wider product rounds in another order
    for weight in (model.lm_head.weight, model.model.embed_tokens.weight):
        assert abs(weight[13:].std().item() / 0.5 - 1) < 0.1
    assert model(IDS + 150).logits.isfinite().all()
    model.resize_token_embeddings(13)
    assert torch.equal(model(IDS).logits, before)


@OF_PEFT
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
    fields = NORMALISED
    if kind in ("decoder", "parts"):
        fields = {"tie_word_embeddings": "lm_head" not in targets}
    model = made(kind, solve={"stop": {"rtol": 1e-6}}, **fields).float()
    model.fold_weight_norm()
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets, **options)
    lora = peft.get_peft_model(copy.deepcopy(model), config)
    before = model(IDS).logits
    close(lora.eval()(IDS).logits, before, 1e-4)
    for _ in range(2):
        step(lora.train())
    expected = lora.eval()(IDS).logits
    assert (expected - before).abs().max() > 1e-3
    assert lora.generate(input_ids=IDS, max_new_tokens=2, do_sample=False).shape == (3, 9)
    merged = lora.merge_and_unload()
    close(merged(IDS).logits, expected, 1e-4)
    merged.save_pretrained(tmp_path)
    again = copy.deepcopy(DeqseqForCausalLM.from_pretrained(tmp_path))
    close(again(IDS).logits, expected, 1e-4)


@OF_PEFT
@pytest.mark.parametrize(("kind", "target"), [("mamba2", "in_proj"), ("decoder", "q_proj")])
def test_an_adapter_with_dropout_is_refused_in_training(kind, target):
    peft = pytest.importorskip("peft")
    options = {"target_modules": [target]}
    for config in (
        peft.LoraConfig(lora_dropout=0.1, **options),
        peft.LoKrConfig(rank_dropout=0.1, **options),
        peft.OFTConfig(module_dropout=0.1, oft_block_size=4, **options),
    ):
        model = made(kind, solve={"stop": {"rtol": 1e-4}}).float()
        adapted = peft.get_peft_model(model, config)
        with pytest.raises(ValueError, match="must have no dropout"):
            adapted.train()(IDS, labels=IDS)
        assert adapted.eval()(IDS).converged.all()


@OF_PEFT
@pytest.mark.parametrize("convert", [to_causal_lm, lambda model: model])
def test_an_adapter_that_counts_layers_is_refused_where_each_part_counts_its_own(convert):
    peft = pytest.importorskip("peft")
    numbered = peft.LoraConfig(target_modules=["q_proj"], layers_to_transform=[1])
    with pytest.raises(ValueError, match="layers_to_transform must be left out, got"):
        peft.get_peft_model(convert(made("decoder")), numbered)
    named = peft.LoraConfig(target_modules=r".*core\.backbone\..*layers\.0\..*q_proj")
    adapted = peft.get_peft_model(convert(made("decoder")), named)
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert len(trained) == 2
    assert all("core.backbone.backbone.layers.0." in name for name in trained)
    assert adapted(IDS).converged.all()
    peft.get_peft_model(convert(made("llama")), numbered)  # it has one part


@OF_PEFT
def test_an_injection_is_trained_with_an_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    fresh = DeqseqForCausalLM(configured("decoder", solve={"stop": dq.Stop.exactly(3)}))
    options = {"target_modules": "all-linear", "modules_to_save": ["injection"]}
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, **options)
    model = peft.get_peft_model(fresh, config).train()
    step(model)
    once, wanted = (model.eval()(IDS, solve={"stop": dq.Stop.exactly(n)}).logits for n in (1, 3))
    assert (once - wanted).abs().max() > 1e-4
    model.save_pretrained(tmp_path)
    base = model.unload()
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(again.eval()(IDS).logits, wanted)
