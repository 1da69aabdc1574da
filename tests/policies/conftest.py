"""A tiny random model with a tokenizer, in memory and as a folder."""

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def make_model(**changes):
    """A Llama of 2 layers whose logits spread over several nats."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))


def make_tokenizer():
    """Forty words and an end token, but none to pad with."""
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(40))]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=TEMPLATE,
    )


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture
def make():
    """Makes a tiny model: `make(tie_word_embeddings=True)`."""
    return make_model


@pytest.fixture
def tokenizer():
    """The tokenizer of the tiny model, in memory."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A folder with the tiny model and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def ids():
    """Two rows of token ids, (2, 7)."""
    return torch.randint(3, 43, (2, 7), generator=torch.Generator().manual_seed(1))
