"""Tiny random models of the families that differ in head, bias, scale, cap and positions."""

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 101
HIDDEN = 32

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Large weights: logits of several nats, so that a lost scale or cap shows.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama-tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=8),
    "gemma2": lambda: Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=3.0),
    "gemma3": lambda: Gemma3TextConfig(
        **SHAPE, head_dim=8, final_logit_softcapping=4.0, sliding_window=4
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=HIDDEN,
        n_layer=2,
        n_head=4,
        initializer_range=0.3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "cohere": lambda: CohereConfig(**SHAPE, logit_scale=0.3),
    "granite": lambda: GraniteConfig(**SHAPE, logits_scaling=5.0),
    # The one here whose head has a bias.
    "phi": lambda: PhiConfig(**SHAPE),
}


@pytest.fixture(params=CONFIGS)
def family(request):
    """Name of each family in turn."""
    return request.param


@pytest.fixture
def build():
    """A function from a family's name to a model in training mode, the same at every call."""

    def build(name, dtype=torch.float32, **changes):
        torch.manual_seed(0)
        config = CONFIGS[name]()
        config.update(changes)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        head = model.get_output_embeddings()
        if head.bias is not None:
            torch.nn.init.normal_(head.bias)
        return model.train()

    transformers.logging.set_verbosity_error()
    return build


# Prompt and response lengths: ordinary, no response at all, one token, the longest.
LENGTHS = [(3, 5), (6, 0), (4, 1), (4, 8), (1, 7)]


@pytest.fixture(params=["right", "left"])
def batch(request):
    """Five rows of unequal length: input_ids, attention_mask, labels, padded on either side."""
    return make_batch(request.param)


@pytest.fixture
def right_padded():
    """The same five rows, padded on the right only."""
    return make_batch("right")


def make_batch(side):
    width = max(prompt + response for prompt, response in LENGTHS)
    generator = torch.Generator().manual_seed(1)
    columns = {"input_ids": [], "attention_mask": [], "labels": []}
    for prompt, response in LENGTHS:
        ids = torch.randint(3, VOCABULARY, (prompt + response,), generator=generator)
        labels = ids.clone()
        labels[:prompt] = -100
        gap = width - len(ids)
        padding = (0, gap) if side == "right" else (gap, 0)
        for name, values, filler in [
            ("input_ids", ids, 0),
            ("attention_mask", torch.ones_like(ids), 0),
            ("labels", labels, -100),
        ]:
            columns[name].append(torch.nn.functional.pad(values, padding, value=filler))
    return {name: torch.stack(rows) for name, rows in columns.items()}
