"""Tiny random models, prompts of unequal length, and requests for their completions."""

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from lit_align.policies import PolicyRecipe
from lit_align.rollout import HuggingFaceEngine, Request, sample_seed
from lit_align.rollout.forward import Forward
from lit_align.rollout.sharing import sharing

VOCABULARY = 61
CONTEXT = 32

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    # Large weights: what stands where in the context must show in the logits.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS = {
    # Learnt absolute positions: a shift under padding changes everything.
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    # A window that some rows outgrow and some do not.
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=16),
    # A cache that forgets, and logits that are capped at the end.
    "gemma2": lambda: Gemma2Config(
        **SHAPE,
        head_dim=8,
        sliding_window=4,
        final_logit_softcapping=3.0,
        tie_word_embeddings=False,
    ),
    # A cache of convolutions beside one of keys and values.
    "lfm2": lambda: Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
}


@pytest.fixture
def build():
    """A function from a family's name to a model in training mode, the same at every call."""

    def build(name, dtype=torch.float32):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).train()

    transformers.logging.set_verbosity_error()
    return build


@pytest.fixture(scope="session")
def tiny():
    """The bundled model, its tokenizer and the ids of some sums, unequal in length."""
    recipe = PolicyRecipe("tiny")
    tokenizer = recipe.tokenizer()
    sums = ["13 + 57 =", "5 + 4 =", "123 - 7 =", "9 - 3 =", "40 + 12 ="]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in sums
    ]
    return recipe.model(), tokenizer, prompts


@pytest.fixture
def engine():
    """A function from a policy to an engine that holds it."""

    def engine(policy, batch_size=64):
        made = HuggingFaceEngine(batch_size)
        made.sync_weights(0, policy)
        return made

    return engine


@pytest.fixture
def requests_for():
    """A function from prompts to requests, `count` samples each or as many as listed."""

    def requests_for(prompts, count=1):
        counts = [count] * len(prompts) if isinstance(count, int) else count
        return [
            Request(list(prompt), list(range(n)), [sample_seed(1, row, 0, k, 0) for k in range(n)])
            for row, (prompt, n) in enumerate(zip(prompts, counts, strict=True))
        ]

    return requests_for


@pytest.fixture
def sharing_policy(build):
    """A function from a family's name to a model that has been tried out and shares prompts."""

    def sharing_policy(name):
        policy = build(name)
        assert sharing(policy, Forward(policy)).obstacle is None
        return policy

    return sharing_policy
