import pytest
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from lit_align.modules.sharding import decoder_layers
from lit_align.policies.adapters import attach_lora

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL_GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 3, "n_head": 2}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**SMALL_GPT2, bos_token_id=1, eos_token_id=2)),
}


@pytest.mark.parametrize("family", MODELS)
def test_the_layers_of_a_model_are_its_blocks(family):
    model = MODELS[family]()
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    assert decoder_layers(model) == list(blocks)


def test_an_adapter_does_not_hide_the_layers():
    model = MODELS["llama"]()
    blocks = list(model.model.layers)
    adapted = attach_lora(model, {"r": 2, "target_modules": ["q_proj"]})
    assert decoder_layers(adapted) == blocks


def test_a_model_that_names_no_layers_has_none():
    assert decoder_layers(nn.Linear(2, 2)) == []
