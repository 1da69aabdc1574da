import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_align.errors import UserError
from lit_align.policies import PolicyRecipe, save_policy
from lit_align.policies.adapters import attach_lora
from lit_align.policies.saving import replacing

# peft asks whether the two sides of a tie shall part; that is what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")

LORA = {
    "plain": {"r": 2, "target_modules": "all-linear"},
    "with a bias": {"r": 2, "target_modules": ["q_proj"], "lora_bias": True},
    "dora": {"r": 2, "target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "rslora": {"r": 4, "target_modules": ["v_proj"], "use_rslora": True},
    "embedding": {"r": 2, "target_modules": ["embed_tokens", "q_proj"]},
    "head": {"r": 2, "target_modules": ["lm_head"]},
    "tokens": {"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": [3, 4]},
    "whole modules": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def train_a_little(model):
    """Moves every trainable weight, so that nothing left out goes unnoticed."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def reloaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_policy_gives_the_same_logits(tmp_path, make, tokenizer, ids, tied):
    model = train_a_little(make(tie_word_embeddings=tied)).eval()
    save_policy(model, tokenizer, tmp_path / "model")
    assert reloaded(tmp_path / "model")(ids).logits.equal(model(ids).logits)
    names = load_file(tmp_path / "model" / "model.safetensors")
    assert ("lm_head.weight" in names) is not tied


def test_tokenizer_template_and_generation_settings_are_saved_with_it(tmp_path, make, tokenizer):
    model = make()
    model.generation_config.max_new_tokens = 7
    save_policy(model, tokenizer, tmp_path)
    found = AutoTokenizer.from_pretrained(tmp_path)
    assert found.chat_template == tokenizer.chat_template
    assert found.get_vocab() == tokenizer.get_vocab()
    assert reloaded(tmp_path).generation_config.max_new_tokens == 7


def test_generation_settings_that_contradict_each_other_do_not_lose_the_model(
    tmp_path, make, tokenizer
):
    # As several public models have them: transformers itself refuses to save these.
    model = make()
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = False
    settings = model.generation_config
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path / "refused")
    save_policy(model, tokenizer, tmp_path / "model")
    assert model.generation_config is settings
    assert reloaded(tmp_path / "model").generation_config.temperature == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_dtype_of_the_weights_is_that_of_the_configuration(tmp_path, make, tokenizer, dtype):
    save_policy(make().to(dtype), tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert {w.dtype for w in load_file(tmp_path / "model.safetensors").values()} == {dtype}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", LORA.values(), ids=LORA)
def test_a_saved_adapter_is_in_the_weights_and_nothing_live_moves(
    tmp_path, make, tokenizer, ids, options, tied
):
    biased = {"attention_bias": True} if options.get("lora_bias") else {}
    model = attach_lora(make(tie_word_embeddings=tied, **biased), options)
    train_a_little(model).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    right = model(ids).logits
    save_policy(model, tokenizer, tmp_path)
    found = reloaded(tmp_path)
    assert type(found).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(found(ids).logits, right, rtol=1e-4, atol=1e-4)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(after[name].equal(before[name]) for name in before)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert model(ids).logits.equal(right)


@pytest.mark.parametrize(("target", "stays_tied"), [("q_proj", True), ("lm_head", False)])
def test_an_adapter_on_one_side_of_a_tie_unties_what_is_saved(
    tmp_path, make, tokenizer, target, stays_tied
):
    model = attach_lora(make(tie_word_embeddings=True), {"r": 2, "target_modules": [target]})
    save_policy(train_a_little(model), tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is stays_tied
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not stays_tied


def test_merging_equals_what_peft_itself_merges(tmp_path, make, tokenizer):
    model = train_a_little(attach_lora(make(), LORA["plain"]))
    save_policy(model, tokenizer, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    right = model.merge_and_unload().state_dict()
    assert found.keys() == right.keys()
    assert all(found[name].equal(right[name]) for name in right)


def test_a_policy_in_training_stays_in_training(tmp_path, tiny_folder, tokenizer, ids):
    model = PolicyRecipe(str(tiny_folder), gradient_checkpointing=True).model().train()
    model.model.layers[0].eval()
    model.lm_head.requires_grad_(requires_grad=False)
    modes = [module.training for module in model.modules()]
    save_policy(model, tokenizer, tmp_path)
    assert [module.training for module in model.modules()] == modes
    assert not model.lm_head.weight.requires_grad
    assert model.is_activation_checkpointing
    assert model.config.use_cache is False
    assert reloaded(tmp_path).config.use_cache is True


def test_gathered_weights_are_saved_instead_of_the_models_own(tmp_path, make, tokenizer, ids):
    model = train_a_little(attach_lora(make(), LORA["plain"]))
    gathered = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    right = model(ids).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    save_policy(model, tokenizer, tmp_path, state_dict=gathered)
    torch.testing.assert_close(reloaded(tmp_path)(ids).logits, right, rtol=1e-4, atol=1e-4)
    assert all((parameter == 0).all() for parameter in model.parameters())


def test_an_older_folder_is_replaced_as_a_whole(tmp_path, make, tokenizer, ids):
    folder = tmp_path / "deep" / "model"
    save_policy(make(), tokenizer, folder)
    (folder / "leftover.txt").write_text("old")
    model = train_a_little(make())
    save_policy(model, tokenizer, folder)
    assert reloaded(folder)(ids).logits.equal(model(ids).logits)
    assert not (folder / "leftover.txt").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_failure_half_way_leaves_the_older_folder_and_no_debris(tmp_path, make, ids):
    class Broken:
        def save_pretrained(self, folder):
            assert (Path(folder) / "model.safetensors").exists()
            raise KeyboardInterrupt

    def names():
        return sorted(path.name for path in tmp_path.iterdir())

    with pytest.raises(KeyboardInterrupt):
        save_policy(make(), Broken(), tmp_path / "model")
    assert names() == []
    with replacing(tmp_path / "model") as draft:
        (draft / "kept").write_text("")
    with pytest.raises(KeyboardInterrupt):
        save_policy(make(), Broken(), tmp_path / "model")
    assert names() == ["model"]
    assert (tmp_path / "model" / "kept").exists()


def test_the_folder_appears_only_when_it_is_complete(tmp_path):
    with replacing(tmp_path / "model") as draft:
        (draft / "file").write_text("")
        assert not (tmp_path / "model").exists()
        assert draft.parent == tmp_path
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["file"]


def test_a_file_in_the_way_is_named(tmp_path, make, tokenizer):
    (tmp_path / "model").write_text("")
    with pytest.raises(UserError, match=r"there is a file of that name"):
        save_policy(make(), tokenizer, tmp_path / "model")
