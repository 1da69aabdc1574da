import importlib.util

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_align.errors import UserError
from lit_align.policies import PolicyRecipe, policy_fingerprint, save_policy

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

VOCABULARY = 48
# Our names and those of the file format.
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
}


def file_name(name):
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def interleaved(weight, heads):
    """Rows as the format wants them: the two halves of each rotary pair side by side."""
    rows, columns = weight.shape
    split = weight.reshape(heads, 2, rows // heads // 2, columns)
    return split.swapaxes(1, 2).reshape(rows, columns)


def write_tokenizer(writer):
    """Letters, and the pairs that two of them merge to."""
    letters = [chr(ord("a") + i) for i in range(26)]
    words = [f"{a}{b}" for a in "abc" for b in "abcdef"]
    tokens = ["<unk>", "<s>", "</s>", *letters, *words]
    tokens += [f"<extra{i}>" for i in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (VOCABULARY - 3)])
    writer.add_token_merges([f"{a} {b}" for a, b in words])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write(model, path, quantisation):
    """The model as a GGUF file of the llama architecture, with a tokenizer of its own."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    write_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        weight = tensor.float().numpy()
        for part, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            weight = interleaved(weight, heads) if part in name else weight
        kind = quantisation if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quants.quantize(np.ascontiguousarray(weight), kind)
        writer.add_tensor(file_name(name), packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(params=["F32", "Q8_0"])
def kind(request):
    return gguf.GGMLQuantizationType[request.param]


@pytest.fixture
def small(make):
    return make(intermediate_size=64, vocab_size=VOCABULARY)


def test_a_gguf_file_gives_its_weights_unpacked(tmp_path, small, kind):
    write(small, tmp_path / "tiny.gguf", kind)
    found = PolicyRecipe(str(tmp_path / "tiny.gguf")).model().state_dict()
    for name, right in small.state_dict().items():
        # Q8_0 keeps 127 steps on either side of 0 and their width in float16, good to 1 in 2048:
        # half a step, and 127/2048 of one.
        allowed = (
            right.abs().max() / 127 * (1 / 2 + 127 / 2048)
            if kind == gguf.GGMLQuantizationType.Q8_0
            else 0
        )
        assert found[name].dtype == torch.float32
        assert (found[name] - right).abs().max() <= allowed, name


def test_what_comes_from_a_gguf_file_is_trained_and_saved_like_any_other(
    tmp_path, small, kind, ids
):
    write(small, tmp_path / "tiny.gguf", kind)
    recipe = PolicyRecipe(str(tmp_path / "tiny.gguf"))
    model = recipe.model()
    model(ids).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    save_policy(model, recipe.tokenizer(), tmp_path / "saved")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert policy_fingerprint(found) == policy_fingerprint(model)
    assert found(ids).logits.equal(model(ids).logits)


def test_its_tokenizer_is_in_the_file_too(tmp_path, small, kind):
    write(small, tmp_path / "tiny.gguf", kind)
    tokenizer = PolicyRecipe(str(tmp_path / "tiny.gguf")).tokenizer()
    assert tokenizer.decode(tokenizer("abz", add_special_tokens=False).input_ids) == "abz"
    assert tokenizer.pad_token is not None
    assert tokenizer.eos_token_id == 2


def test_a_file_of_the_same_name_in_the_working_directory_is_not_taken(
    tmp_path, small, kind, monkeypatch
):
    (tmp_path / "deep").mkdir()
    write(small, tmp_path / "deep" / "tiny.gguf", kind)
    (tmp_path / "tiny.gguf").write_bytes(b"something else")
    monkeypatch.chdir(tmp_path)
    model = PolicyRecipe("deep/tiny.gguf").model()
    assert model.config.vocab_size == VOCABULARY


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"something else, long enough to hold a header of its own")
    with pytest.raises(UserError, match=r"tiny\.gguf"):
        PolicyRecipe(str(tmp_path / "tiny.gguf")).model()


@pytest.mark.parametrize(("package", "extra"), [("gguf", "gguf"), ("accelerate", "gguf")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, package, extra):
    (tmp_path / "tiny.gguf").write_bytes(b"")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "lit_align.policies.source.find_spec", lambda name: None if name == package else real(name)
    )
    with pytest.raises(UserError, match=rf"'{package}'.*lit-align\[{extra}\]"):
        PolicyRecipe(str(tmp_path / "tiny.gguf")).model()
