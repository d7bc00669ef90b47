"""PEFT's adapters on our models: they begin as the model, learn, and merge into its weights."""

import copy

import pytest
import torch
from hf_models import IDS, Llama, Mamba2, Retrofit

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning", "ignore::UserWarning:peft")

FAMILIES = pytest.mark.parametrize(
    ("family", "targets"),
    [(Mamba2, ["in_proj", "out_proj"]), (Llama, ["q_proj", "o_proj"]), (Retrofit, ["q_proj", "o_proj"])],
    ids=["Mamba2", "Llama", "Retrofit"],
)


def adapted(model, targets: list[str], **options):
    """A trained adapter in eval mode."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets, **options)
    lora = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        assert (lora.eval()(IDS).logits - model(IDS).logits).abs().max() < 1e-4
    optimizer = torch.optim.SGD([weight for weight in lora.parameters() if weight.requires_grad], lr=0.05)
    for _ in range(2):
        lora.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return lora.eval()


@FAMILIES
@pytest.mark.parametrize("options", [{}, {"init_lora_weights": "pissa"}, {"trainable_token_indices": [1, 2]}], ids=str)
@torch.no_grad()
def test_an_adapter_merges(family, targets, options, tmp_path):
    fields = {} if family is Retrofit else {"weight_norm": True}
    model = family().model(solve={"stop": {"rtol": 1e-6}}, **fields).float()
    model.fold_weight_norm()
    with torch.enable_grad():
        lora = adapted(model, targets, **options)
    wanted = lora(IDS).logits
    assert (wanted - model(IDS).logits).abs().max() > 1e-3
    merged = lora.merge_and_unload()
    assert (merged(IDS).logits - wanted).abs().max() < 1e-4
    merged.save_pretrained(tmp_path)
    again = copy.deepcopy(type(model).from_pretrained(tmp_path))
    assert (again(IDS).logits - wanted).abs().max() < 1e-4


@FAMILIES
def test_an_adapter_of_the_embedding_learns_and_generates(family, targets):
    model = family().model(tie_word_embeddings=False)
    lora = adapted(model, [*targets, "embed_tokens", "lm_head"])
    assert lora.generate(input_ids=IDS, max_new_tokens=2, do_sample=False).shape == (3, 9)
