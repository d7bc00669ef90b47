"""Losses, gradients and vocabularies of every model of ours: inherited by one class a family."""

import copy

import pytest
import torch
from hf_models import IDS, LEFT
from torch.nn import functional as F

import deqseq as dq
from deqseq.integrations.huggingface import to_causal_lm


def gradients(model, **options) -> dict:
    model.zero_grad()
    model(IDS, labels=IDS, **options).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def saved_numbers(model) -> int:
    """How many numbers the graph of a loss keeps."""
    sizes = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.update({id(x): x.numel()}) or x, lambda x: x):
        loss = model(IDS, labels=IDS).loss
    return sum(sizes.values()) if loss.requires_grad else 0


class TrainingContract:
    def test_loss_and_gradients_are_those_of_the_core(self):
        model = self.model().train()
        loss, mine = model(IDS, labels=IDS).loss, gradients(model)
        wanted = to_causal_lm(model)(IDS, labels=IDS).loss
        assert abs(loss.item() - wanted.item()) < 1e-5
        model.zero_grad()
        wanted.backward()
        compared = 0
        for name, parameter in model.named_parameters():
            assert (mine[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name
            compared += parameter.grad.norm().item() > 1e-6
        assert compared > 15

    def test_embedded_tokens_are_dropped_as_in_the_core(self):
        model = self.model(embedding_dropout=0.5).train()
        core = to_causal_lm(model)
        torch.manual_seed(1)
        mine = model(IDS).logits
        torch.manual_seed(1)
        assert torch.equal(mine, core(IDS).logits)
        assert not torch.allclose(mine, model(IDS).logits)
        assert torch.equal(model.eval()(IDS).logits, self.model()(IDS).logits)

    @torch.no_grad()
    def test_which_labels_count(self):
        """As in transformers, all that are not -100, after padding on the left, too."""
        model, labels = self.model(), IDS.masked_fill(~LEFT, -100)
        labels[0, 3] = -100
        output = model(IDS, labels=labels, attention_mask=LEFT.long())
        each = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        count = (labels[:, 1:] != -100).sum()
        assert count == 11
        assert abs(output.loss.item() - each.sum().item() / 11) < 1e-5
        parted = model(IDS, labels=labels, attention_mask=LEFT.long(), num_items_in_batch=torch.tensor(22)).loss
        assert abs(parted.item() - output.loss.item() / 2) < 1e-5
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
        assert model(IDS, shift_labels=shifted, attention_mask=LEFT.long()).loss == output.loss

    def test_a_part_of_a_batch_may_have_nothing_to_score(self):
        model, nothing = self.model().train(), torch.full_like(IDS, -100)
        loss = model(IDS, labels=nothing, num_items_in_batch=torch.tensor(5)).loss
        loss.backward()
        assert loss == 0
        for count in (None, 0):
            with pytest.raises(ValueError, match="labels leave nothing to score"):
                model(IDS, labels=nothing, num_items_in_batch=count)

    def test_the_trainer_leaves_out_what_it_cannot_gather(self):
        model = self.model()
        left_out = model.config.keys_to_ignore_at_inference
        output = model(IDS, labels=IDS)
        assert [name for name in output if name not in left_out] == ["loss", "logits"]
        assert model.accepts_loss_kwargs

    def test_gradient_checkpointing(self):
        if not self.implicit:
            return
        model = self.model().train()
        plain = gradients(model)
        model.activation_checkpointing_enable()
        assert model.model.solved.solve.gradient == dq.Phantom(checkpoint=True)
        assert model.model.gradient_checkpointing
        with_graph = []
        backbone = model.model.solved.backbone
        hook = backbone.register_forward_pre_hook(lambda *_: with_graph.append(torch.is_grad_enabled()))
        again = gradients(model)
        hook.remove()
        assert sum(with_graph) == 9  # the first evaluation, four phantom steps, and those again in the backward pass
        for name, gradient in plain.items():
            assert (again[name] - gradient).abs().max() < 1e-10, name
        model.activation_checkpointing_disable()
        assert model.model.solved.solve.gradient == dq.Phantom(checkpoint=False)

    def test_gradient_checkpointing_of_an_explicit_model(self):
        if self.implicit:
            return
        model = self.model().train()
        plain, kept = gradients(model), saved_numbers(model)
        model.activation_checkpointing_enable()
        assert model.model.gradient_checkpointing
        assert saved_numbers(model) < 0.6 * kept
        again = gradients(copy.deepcopy(model))
        for name, gradient in plain.items():
            assert torch.equal(again[name], gradient), name
        model.activation_checkpointing_disable()
        assert not model.model.gradient_checkpointing
        assert saved_numbers(model) == kept

    def test_where_nothing_can_be_recomputed(self):
        fields = {"solve": {"gradient": "OneStep"}} if self.implicit else {"weight_norm": True}
        model = self.model(**fields).train()
        plain = gradients(model)
        found = r"the gradient OneStep\(\)" if self.implicit else "weight normalisation"
        with pytest.warns(UserWarning, match=f"gradient checkpointing has no effect: with {found}"):
            model.activation_checkpointing_enable()
        again = gradients(model)
        assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())

    def test_the_gradient_is_chosen_by_the_configuration(self):
        if not self.implicit:
            return
        exact = gradients(self.model(solve={"gradient": dq.Implicit(stop=dq.Stop(rtol=1e-12, max_steps=200))}).train())
        name = "model.core.backbone.injection_norm.weight"
        error = {}
        for steps in (1, 40):
            phantom = gradients(self.model(solve={"gradient": {"steps": steps}}).train())
            error[steps] = ((phantom[name] - exact[name]).norm() / exact[name].norm()).item()
        assert error[40] < 1e-3 < 0.1 < error[1], error

    @pytest.mark.parametrize("tied", [True, False])
    @torch.no_grad()
    def test_resize_token_embeddings(self, tied):
        model = self.model(tie_word_embeddings=tied)
        before = model(IDS).logits
        model.resize_token_embeddings(200, mean_resizing=False)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert (model.config.vocab_size, model(IDS).logits.shape) == (200, (3, 7, 200))
        assert (model(IDS).logits[..., :13] - before).abs().max() < 1e-12  # a wider product rounds in another order
        for weight in {model.lm_head.weight, model.model.embed_tokens.weight}:
            assert abs(weight[13:].std().item() / 0.5 - 1) < 0.1
        assert model(IDS.clamp(min=1) + 150).logits.isfinite().all()
        model.resize_token_embeddings(13)
        assert torch.equal(model(IDS).logits, before)
