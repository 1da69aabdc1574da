import logging

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, Lfm2Config, MambaConfig

from lit_align.logprobs import plain_attention, response_logprobs
from lit_align.logprobs.abilities import abilities
from lit_align.logprobs.causal_lm import take_apart
from lit_align.logprobs.layouts import packed_batch

# What a test shares: two rows of one prompt.
IDS = torch.arange(3, 3 + 2 * 26).view(2, 26)
IDS[1, :20] = IDS[0, :20]
LABELS = IDS.where(torch.arange(26) >= 20, -100)
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": LABELS}
SMALL = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}

UNPACKABLE = {
    "mamba": (MambaConfig(**SMALL), "convolutions over neighbouring tokens"),
    "lfm2": (
        Lfm2Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
                   layer_types=["conv", "full_attention"]),
        "convolutions",
    ),
    "bloom": (BloomConfig(**SMALL, n_head=4), "takes no position ids"),
    "falcon": (FalconConfig(**SMALL, num_attention_heads=4, alibi=True), "biased by distance"),
}  # fmt: skip


def built(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train()


def layers_of(kind):
    def change(model):
        model.config.layer_types = ["full_attention", kind]

    return change


@pytest.mark.parametrize("layout", ["packed", "shared", "auto"])
@pytest.mark.parametrize("name", UNPACKABLE)
def test_a_model_whose_tokens_meet_elsewhere_stays_padded_and_one_line_says_why(
    name, layout, caplog
):
    config, words = UNPACKABLE[name]
    model = built(config)
    right = response_logprobs(model, **BATCH, layout="padded").logprobs
    caplog.clear()
    with caplog.at_level(logging.INFO, "lit_align"):
        for _ in range(2):
            assert response_logprobs(model, **BATCH, layout=layout).logprobs.equal(right)
    (record,) = [r for r in caplog.records if r.name.startswith("lit_align")]
    assert f"{type(model).__name__} keeps its rows padded: " in record.message
    assert words in record.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (layers_of("linear_attention"), "layers of the kinds linear_attention"),
        (layers_of("chunked_attention"), "layers of the kinds chunked_attention"),
        (layers_of("sliding_attention"), "windows of its 1 sliding layers are unknown"),
        (lambda m: setattr(m.config, "num_hidden_layers", 3), "2 of its 3 layers"),
        (lambda m: setattr(m.config, "is_encoder_decoder", True), "an encoder"),
        (lambda m: setattr(m.config, "max_position_embeddings", 16), "context of 16 tokens"),
        (lambda m: setattr(type(m), "_supports_attention_backend", False), "cannot be chosen"),
        (lambda m: setattr(m.config, "_attn_implementation", "mine"), "'mine' is unknown"),
    ],
)
def test_every_obstacle_has_its_words(build, change, words, monkeypatch):
    model = build("llama")
    monkeypatch.setattr(type(model), "_supports_attention_backend", True)
    change(model)
    assert words in abilities(model).no_packing
    assert not abilities(model).pack()


class Memory(nn.Module):
    """A layer with a state that runs along the sequence and that no configuration speaks of."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden) + hidden.cumsum(1) / 10


def test_a_trial_notices_what_no_configuration_tells(build):
    model = build("llama")
    for layer in model.model.layers:
        layer.mlp = Memory(layer.mlp)
    assert "packed, its hidden states differ by" in abilities(model).no_packing
    assert model.config._attn_implementation == "sdpa"
    padded, shared = (response_logprobs(model, **BATCH, layout=x) for x in ("padded", "shared"))
    assert padded.logprobs.equal(shared.logprobs)


@pytest.mark.parametrize("where", ["module", "attention"])
def test_with_dropout_on_nothing_is_shared_and_one_line_says_so(build, caplog, where):
    if where == "module":
        model = build("gpt2", resid_pdrop=0.5)
    else:
        model = build("llama", attention_dropout=0.5)
    with caplog.at_level(logging.INFO, "lit_align"):
        torch.manual_seed(1)
        first = response_logprobs(model, **BATCH, layout="shared").logprobs
        torch.manual_seed(1)
        assert first.equal(response_logprobs(model, **BATCH, layout="packed").logprobs)
        assert not abilities(model).share()
    (record,) = caplog.records
    assert "prompts not shared: it trains with dropout" in record.message
    model.eval()
    assert abilities(model).share()
    right = response_logprobs(model, **BATCH, layout="padded").logprobs
    assert_close(response_logprobs(model, **BATCH, layout="shared").logprobs, right)


def test_the_trial_changes_neither_modes_nor_random_state(build):
    model = build("llama", attention_dropout=0.5)
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    assert abilities(model).pack()
    assert [module.training for module in model.modules()] == modes
    assert torch.get_rng_state().equal(state)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_known_architectures_can_be_packed_in_any_precision(family, build, dtype):
    model = build(family, dtype)
    assert abilities(model).no_packing is None
    assert plain_attention(model.config) in {"sdpa", "eager"}


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_attention_chosen_afterwards_is_tried_anew(build, name):
    model = build("llama")
    response_logprobs(model, **BATCH, layout="shared")
    model.set_attn_implementation(name)
    right = response_logprobs(model, **BATCH, layout="padded").logprobs
    assert_close(response_logprobs(model, **BATCH, layout="shared").logprobs, right)
    assert plain_attention(model.config) == name


def test_attention_that_knows_no_segments_is_no_wrong_number(build):
    model = build("llama")
    assert abilities(model).pack()
    batch = packed_batch(model, "shared", *BATCH.values())
    model.config._attn_implementation = "sdpa"
    with pytest.raises(RuntimeError, match="knows nothing of segments"):
        take_apart(model).packed_states(batch)


def test_dropout_that_comes_later_is_not_shared(build):
    model = build("llama").train()
    response_logprobs(model, **BATCH, layout="shared")
    assert abilities(model).share()
    layer = model.model.layers[0]
    layer.mlp.up_proj = nn.Sequential(layer.mlp.up_proj, nn.Dropout(0.0))
    assert abilities(model).share()
    layer.mlp.up_proj[1].p = 0.5
    assert not abilities(model).share()
    assert abilities(model.eval()).share()


def test_a_head_with_a_forward_of_its_own_is_called(build):
    model = build("llama")
    usual = model.lm_head.forward
    model.lm_head.forward = lambda hidden: usual(hidden) * 2
    found = response_logprobs(model, **BATCH, layout="padded").logprobs
    right = model(BATCH["input_ids"]).logits[:, :-1].log_softmax(-1)
    right = right.gather(-1, IDS[:, 1:, None])[..., 0] * (LABELS[:, 1:] != -100)
    assert_close(found, right, rtol=1e-5, atol=1e-5)
