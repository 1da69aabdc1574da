import hashlib

import pytest
import torch

from lit_align.policies import PolicyRecipe, policy_fingerprint, save_policy
from lit_align.policies.adapters import attach_lora

# peft asks whether the two sides of a tie shall part; that is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")


def test_a_copy_has_the_same_fingerprint_and_one_flipped_bit_another(make):
    model = make()
    first = policy_fingerprint(model)
    assert first == policy_fingerprint(make())
    assert len(first) == 64
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.view(torch.int32)[3, 5] ^= 1
    assert policy_fingerprint(model) != first
    with torch.no_grad():
        weight.view(torch.int32)[3, 5] ^= 1
    assert policy_fingerprint(model) == first


def test_fingerprint_by_hand():
    # One weight, and the order of names: sha256 of the digests of "name dtype shape bytes".
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(2.0)
    one, two = bytes.fromhex("0000803f"), bytes.fromhex("00000040")
    digests = [
        hashlib.sha256(b"bias float32 [1] " + two).digest(),
        hashlib.sha256(b"weight float32 [1, 1] " + one).digest(),
    ]
    assert policy_fingerprint(model) == hashlib.sha256(b"".join(digests)).hexdigest()


def test_mode_gradients_and_device_of_the_moment_do_not_count(make, ids):
    model = make()
    first = policy_fingerprint(model)
    model.train()
    model(ids).logits.sum().backward()
    model.requires_grad_(requires_grad=False)
    assert policy_fingerprint(model) == first


def test_names_shapes_and_dtypes_count(make):
    class Holder(torch.nn.Module):
        def __init__(self, **weights):
            super().__init__()
            for name, weight in weights.items():
                self.register_buffer(name, weight)

    zeros = torch.zeros(4, 2)
    fingerprints = {
        policy_fingerprint(Holder(a=zeros)),
        policy_fingerprint(Holder(b=zeros)),
        policy_fingerprint(Holder(a=zeros.view(2, 4))),
        policy_fingerprint(Holder(a=zeros.to(torch.bfloat16))),
        policy_fingerprint(Holder(a=zeros.to(torch.float16))),
        policy_fingerprint(Holder(a=zeros, b=zeros.clone())),
        policy_fingerprint(Holder()),
    }
    assert len(fingerprints) == 7
    assert policy_fingerprint(make().to(torch.bfloat16)) != policy_fingerprint(make())


def test_scalars_and_strided_weights_have_a_fingerprint():
    module = torch.nn.Module()
    module.register_buffer("scalar", torch.tensor(1.5))
    module.register_buffer("strided", torch.arange(6.0).view(2, 3).T)
    dense = torch.nn.Module()
    dense.register_buffer("scalar", torch.tensor(1.5))
    dense.register_buffer("strided", torch.arange(6.0).view(2, 3).T.contiguous())
    assert policy_fingerprint(module) == policy_fingerprint(dense)


def test_tied_weights_count_once(make):
    tied = make(tie_word_embeddings=True)
    before = policy_fingerprint(tied)
    untied = make(tie_word_embeddings=False)
    with torch.no_grad():
        untied.lm_head.weight.copy_(untied.model.embed_tokens.weight)
    assert policy_fingerprint(untied) != before
    tied.lm_head = torch.nn.Identity()
    assert policy_fingerprint(tied) == before


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": "all-linear", "use_dora": True},
        {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
    ],
    ids="+".join,
)
def test_base_and_base_under_an_adapter_agree_fresh_or_trained(make, options, tied):
    base = policy_fingerprint(make(tie_word_embeddings=tied))
    model = attach_lora(make(tie_word_embeddings=tied), {"r": 2, **options})
    assert policy_fingerprint(model) == base
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    assert policy_fingerprint(model) == base
    with torch.no_grad():
        model.get_base_model().model.norm.weight.add_(1.0)
    assert policy_fingerprint(model) != base


def test_a_saved_policy_loads_with_its_fingerprint(tmp_path, make, tokenizer):
    model = make()
    save_policy(model, tokenizer, tmp_path)
    assert policy_fingerprint(PolicyRecipe(str(tmp_path)).model()) == policy_fingerprint(model)
