import json
import pickle
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, HyperCLOVAXConfig

from lit_align.errors import UserError
from lit_align.logprobs import response_logprobs
from lit_align.policies import PolicyRecipe, has_adapter, reference_mode


def test_a_folder_gives_its_model_in_the_dtype_asked_for(tiny_folder, ids):
    model = PolicyRecipe(str(tiny_folder)).model()
    right = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert model(ids).logits.equal(right(ids).logits)
    assert model.dtype == torch.float32
    assert PolicyRecipe(str(tiny_folder), dtype="bfloat16").model().dtype == torch.bfloat16


def test_auto_takes_the_dtype_of_the_files(tmp_path, make):
    make().to(torch.bfloat16).save_pretrained(tmp_path)
    assert PolicyRecipe(str(tmp_path), dtype="auto").model().dtype == torch.bfloat16
    assert PolicyRecipe(str(tmp_path)).model().dtype == torch.float32


def test_the_attention_asked_for_is_used(tiny_folder):
    for name in ("eager", "sdpa"):
        model = PolicyRecipe(str(tiny_folder), attn_implementation=name).model()
        assert model.config._attn_implementation == name


def test_nothing_is_loaded_before_it_is_asked_for():
    recipe = PolicyRecipe("no/such/folder/anywhere", lora={"r": 2})
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_a_missing_pad_token_becomes_the_end_token_and_the_vocabulary_stays(tiny_folder, tokenizer):
    loaded = PolicyRecipe(str(tiny_folder)).tokenizer()
    assert tokenizer.pad_token is None
    assert loaded.pad_token == loaded.eos_token == "</s>"
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.chat_template == tokenizer.chat_template


def test_a_pad_token_of_its_own_is_kept(tmp_path, tiny_folder, tokenizer):
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    tokenizer.pad_token = "<unk>"
    tokenizer.save_pretrained(tmp_path)
    assert PolicyRecipe(str(tmp_path)).tokenizer().pad_token == "<unk>"


def test_a_tokenizer_without_pad_and_end_token_is_refused(tmp_path, tiny_folder, tokenizer):
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="neither a pad nor an end token"):
        PolicyRecipe(str(tmp_path)).tokenizer()


def test_a_chat_template_replaces_the_tokenizers_own(tmp_path, tiny_folder):
    text = "{{ messages[0]['content'] }}"
    file = tmp_path / "template.jinja"
    file.write_text(text)
    chat = [{"role": "user", "content": "w1"}]
    for given in (text, str(file)):
        tokenizer = PolicyRecipe(str(tiny_folder), chat_template=given).tokenizer()
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "w1"
    with pytest.raises(UserError, match=r"neither a Jinja text .* nor a file: 'chatml'"):
        PolicyRecipe(str(tiny_folder), chat_template="chatml").tokenizer()


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_gradient_checkpointing_changes_no_gradient(tiny_folder, ids, lora):
    gradients = []
    for checkpointing in (False, True):
        # Both kept as autograd keeps it: lean models add gradients up in another order.
        recipe = PolicyRecipe(
            str(tiny_folder), gradient_checkpointing=checkpointing, lean=False, lora=lora
        )
        torch.manual_seed(0)
        model = recipe.model().train()
        assert model.config.use_cache is not checkpointing
        if lora:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.normal_()
        response_logprobs(model, ids, torch.ones_like(ids), ids).logprobs.sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    plain, found = gradients
    assert all(gradient.abs().max() > 0 for gradient in plain.values())
    assert all(torch.allclose(found[name], plain[name], rtol=1e-5, atol=1e-6) for name in plain)


def test_gradient_checkpointing_really_computes_layers_again(tiny_folder, ids):
    calls = []
    model = PolicyRecipe(str(tiny_folder), gradient_checkpointing=True).model().train()
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    scored = response_logprobs(model, ids, torch.ones_like(ids), ids, layout="padded")
    scored.logprobs.sum().backward()
    assert len(calls) == 2


def test_lora_trains_the_adapter_only_and_its_reference_is_the_base(tiny_folder, ids):
    base = PolicyRecipe(str(tiny_folder)).model()
    model = PolicyRecipe(str(tiny_folder), lora={"r": 2, "target_modules": "all-linear"}).model()
    assert has_adapter(model)
    assert not has_adapter(base)
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert not torch.allclose(model(ids).logits, base(ids).logits)
    with reference_mode(model):
        assert model(ids).logits.equal(base(ids).logits)
    with reference_mode(base):
        assert base(ids).logits.equal(base(ids).logits)
    assert not torch.allclose(model(ids).logits, base(ids).logits)
    assert any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "fp32"}, "unknown dtype 'fp32': choose one of auto, bfloat16, float16, float32"),
        ({"attn_implementation": "spda"}, "unknown attn_implementation 'spda': .*eager.*sdpa"),
        ({"lora": {"rank": 2}}, "unknown LoRA option 'rank'"),
        ({"lora": {"lora_alhpa": 2}}, "'lora_alhpa': did you mean 'lora_alpha'"),
        ({"lora": {"target_modules": ["qproj"]}}, r"qproj.*its linear layers: down_proj.*q_proj"),
        ({"lora": {"ensure_weight_tying": True}}, "ensure_weight_tying is not supported"),
        ({"lora": {"r": 0}}, "LoRA does not fit LlamaForCausalLM: .*r.*"),
        ({"lora": {"init_lora_weights": "pissa"}}, "does not start as a copy of the model"),
        ({"lora": {"init_lora_weights": False}}, "leave init_lora_weights at its default"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_message(tiny_folder, settings, message):
    with pytest.raises(UserError, match=message):
        PolicyRecipe(str(tiny_folder), **settings).model()


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_what_is_not_there_is_named(tmp_path, part):
    def load(pretrained):
        getattr(PolicyRecipe(str(pretrained)), part)()

    with pytest.raises(UserError, match=r"there is no folder '.*gone' \(looked from"):
        load(tmp_path / "gone")
    with pytest.raises(UserError, match=r"there is no folder 'a/b/c' \(looked from"):
        load("a/b/c")
    with pytest.raises(UserError, match=r"there is no file 'gone.gguf'"):
        load("gone.gguf")
    with pytest.raises(UserError, match=r"holds no config.json"):
        load(tmp_path)
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(UserError, match="is a file: give the folder"):
        load(tmp_path / "weights.bin")
    with pytest.raises(UserError, match="'no-such/model' is neither a folder nor reachable"):
        load("no-such/model")


def test_a_folder_without_weights_or_with_broken_ones_is_named(tmp_path, tiny_folder):
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"the weights of '.*' cannot be read"):
        PolicyRecipe(str(tmp_path)).model()
    weights.unlink()
    with pytest.raises(UserError, match=r"is not complete: .*model.safetensors"):
        PolicyRecipe(str(tmp_path)).model()


def test_weights_that_no_file_holds_are_not_made_up(tmp_path, make):
    model = make()
    weights = model.state_dict()
    del weights["lm_head.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(UserError, match=r"lack lm_head.weight"):
        PolicyRecipe(str(tmp_path)).model()


def test_a_model_whose_logits_are_treated_in_an_unknown_way_is_refused(tmp_path, make):
    settings = make().config.to_dict() | {"logits_scaling": 4.0, "architectures": None}
    del settings["model_type"]
    AutoModelForCausalLM.from_config(HyperCLOVAXConfig(**settings)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="HyperCLOVAXForCausalLM is not supported"):
        PolicyRecipe(str(tmp_path)).model()


def test_code_that_comes_with_a_model_is_not_run_unless_asked(tmp_path, tiny_folder):
    shutil.copytree(tiny_folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "mine"
    config["auto_map"] = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="trust_remote_code"):
        PolicyRecipe(str(tmp_path)).model()


@pytest.mark.parametrize("kind", ["modules", "numbers"])
def test_dropout_is_off_in_training_unless_kept(tmp_path, make, ids, kind):
    if kind == "modules":
        sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 48, "n_positions": 64}
        model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.5))
    else:
        model = make(attention_dropout=0.5)
    model.save_pretrained(tmp_path)
    for kept in (False, True):
        policy = PolicyRecipe(str(tmp_path), disable_dropout=not kept).model().train()
        first, second = (policy(ids).logits for _ in range(2))
        assert torch.equal(first, second) != kept


def test_dropout_of_an_adapter_stays(tiny_folder):
    lora = {"r": 2, "lora_dropout": 0.5, "target_modules": "all-linear"}
    policy = PolicyRecipe(tiny_folder, lora=lora).model()
    assert {m.p for m in policy.modules() if isinstance(m, torch.nn.Dropout)} == {0.5}
