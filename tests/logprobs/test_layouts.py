import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, MistralConfig, OPTConfig

from lit_align.logprobs import response_logprobs
from lit_align.logprobs.layouts import packed_batch
from lit_align.logprobs.packing import SMALLEST_PREFIX

# What peft 0.21 reads of a model, transformers 5.24 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")

LAYOUTS = ["packed", "shared", "auto"]
PROMPT = SMALLEST_PREFIX + 4
# Prompt (by number, length) and response: two pairs of which one row is one token, a filler row
# without any, a row alone, and a prompt too short to share.
ROWS = [
    (0, PROMPT, 5),
    (1, PROMPT + 3, 1),
    (0, PROMPT, 9),
    (1, PROMPT + 3, 7),
    (0, PROMPT, 0),
    (2, 6, 4),
    (3, 3, 8),
    (3, 3, 2),
]
ALL = {"entropy": True, "alignment": "sampled"}


@pytest.fixture
def pairs():
    return rows_of(ROWS)


def rows_of(rows, vocabulary=101):
    """Input ids, attention mask and labels, every third row padded on the left."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(3, vocabulary, (9, 64), generator=generator)
    width = max(prompt + response for _, prompt, response in rows) + 2
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (number, prompt, response) in enumerate(rows):
        start = 0 if row % 3 else width - prompt - response
        first, stop = start + prompt, start + prompt + response
        ids[row, start:first] = prompts[number, :prompt]
        ids[row, first:stop] = torch.randint(3, vocabulary, (response,), generator=generator)
        mask[row, start:stop] = 1
        labels[row, first:stop] = ids[row, first:stop]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def terms_and_gradient(model, batch, layout, **options):
    """Everything that is returned, and the gradient of a sum that weighs tokens differently."""
    found = response_logprobs(model, **batch, layout=layout, chunk_size=7, **options)
    weights = torch.linspace(-1, 2, found.logprobs.numel(), dtype=found.logprobs.dtype)
    model.zero_grad()
    (weights.view_as(found.logprobs) * found.logprobs).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.requires_grad]
    return found, torch.cat(gradients)


def assert_same(model, batch, layout, tolerance, **options):
    """Sums within the tolerance, gradients within it relative in L2, against padded rows."""
    right, right_gradient = terms_and_gradient(model, batch, "padded", **options)
    found, gradient = terms_and_gradient(model, batch, layout, **options)
    assert found.mask.equal(right.mask)
    for one, other in zip(found[::2] + found[3:], right[::2] + right[3:], strict=True):
        if other is not None:
            assert one.dtype == other.dtype
            assert_close(one.sum(-1), other.sum(-1), rtol=tolerance, atol=tolerance)
            assert (one[~found.mask] == 0).all()
    assert right_gradient.norm() > 0
    assert (gradient - right_gradient).norm() <= tolerance * right_gradient.norm()


def runs(model, batch, layout):
    """How many tokens a layout runs, without what padded rows run."""
    packed = packed_batch(model, layout, *batch.values())
    return None if packed is None else packed.input_ids.numel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_values_and_gradients_of_padded_rows(family, build, pairs, layout):
    model = build(family)
    assert_same(model, pairs, layout, 1e-5, **ALL, temperature=0.7)
    assert runs(model, pairs, layout) is not None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt2", "phi"])
def test_in_float64_layouts_agree_to_the_last_digits(build, pairs, name, layout):
    """Models without a step that is always in float32, as RMSNorm is."""
    assert_same(build(name, torch.float64), pairs, layout, 1e-12, **ALL)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_shorter_than_the_rows_slides_over_prefix_and_branch(
    build, pairs, layout, implementation
):
    shape = build("llama").config.to_dict()
    del shape["model_type"], shape["architectures"]
    config = MistralConfig(**shape | {"sliding_window": 5})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).train()
    assert_same(model, pairs, layout, 1e-5, **ALL)
    assert runs(model, pairs, layout) is not None
    windowed = response_logprobs(model, **pairs, layout=layout).logprobs
    for layer in model.model.layers:
        layer.self_attn.config.sliding_window = None
    assert not torch.allclose(windowed, response_logprobs(model, **pairs, layout=layout).logprobs)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_learnt_positions_and_either_attention_agree(pairs, implementation):
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=101, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0, init_std=0.3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).train()
    assert_same(model, pairs, "shared", 1e-5)
    assert runs(model, pairs, "shared") is not None


def test_how_many_tokens_each_layout_runs(build, pairs):
    model = build("llama")
    # Each row without its last token; the row without a response not at all.
    alone = sum(prompt + response - 1 for _, prompt, response in ROWS if response)
    assert runs(model, pairs, "padded") is None
    assert runs(model, pairs, "packed") == alone
    # The rows of pair 1 share the shorter one's 23 tokens, those of pair 0 their prompt.
    assert runs(model, pairs, "shared") == alone - PROMPT - (PROMPT + 3)
    assert runs(model, pairs, "auto") == runs(model, pairs, "shared")


def test_branches_of_one_length_behind_prefixes_of_different_lengths_agree(build):
    rows = [(0, PROMPT, 4), (0, PROMPT, 4), (1, PROMPT + 5, 4), (1, PROMPT + 5, 4)]
    assert_same(build("llama"), rows_of(rows), "shared", 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_label_in_the_first_column_is_not_scored(build, layout):
    model = build("llama")
    batch = {name: values[:, :4] for name, values in rows_of([(0, 20, 5), (1, 20, 5)]).items()}
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    batch["labels"] = batch["input_ids"].where(torch.arange(4) < 1, -100)
    assert not response_logprobs(model, **batch, layout=layout).mask.any()
    batch["labels"] = batch["input_ids"]
    assert_same(model, batch, layout, 1e-5)


class Squares(TorchDispatchMode):
    """Collects shapes of tensors with an entry for each pair of tokens of the sequence."""

    def __init__(self, size):
        super().__init__()
        self.size = size
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor) and value.shape[-2:] == (self.size, self.size):
                self.shapes.append(value.shape)
        return result


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_no_mask_over_the_whole_sequence_is_ever_made(build, pairs, name, layout):
    model = build(name)
    with Squares(runs(model, pairs, layout)) as watch:
        response_logprobs(model, **pairs, layout=layout).logprobs.sum().backward()
    assert not watch.shapes


def test_auto_leaves_padded_what_saves_nothing(build):
    model = build("llama")
    batch = rows_of([(0, 5, 9), (1, 5, 9), (2, 5, 9)])
    real = batch["attention_mask"].bool()
    tight = {name: values[real].view(3, 14) for name, values in batch.items()}
    assert runs(model, tight, "auto") is None
    assert runs(model, tight, "packed") == 3 * 13


def test_a_whole_group_of_equal_responses_runs_as_one_row(build):
    batch = rows_of([(0, PROMPT, 6)])
    group = {name: values.repeat(4, 1) for name, values in batch.items()}
    model = build("qwen3")
    assert runs(model, group, "shared") == PROMPT + 5
    assert_same(model, group, "shared", 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_without_responses_gives_zeros_and_zero_gradients(build, pairs, layout):
    model = build("gpt2")
    pairs["labels"] = torch.full_like(pairs["labels"], -100)
    found, gradient = terms_and_gradient(model, pairs, layout)
    assert (found.logprobs == 0).all()
    assert (gradient == 0).all()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2"])
def test_the_backward_pass_of_gradient_checkpointing_attends_as_the_forward_pass_did(
    build, pairs, name, layout, reentrant
):
    model = build(name)
    _, right = terms_and_gradient(model, pairs, "padded")
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    _, found = terms_and_gradient(model, pairs, layout)
    assert (found - right).norm() <= 1e-5 * right.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lora_gets_the_same_gradients(build, pairs, layout):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False
    )
    model = peft.get_peft_model(build("qwen2"), config)
    assert_same(model, pairs, layout, 1e-5)
    assert runs(model, pairs, layout) is not None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_autocast_layouts_differ_by_roundings_of_bf16(build, pairs, layout):
    model = build("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(model, pairs, layout, 3e-2)
        assert runs(model, pairs, layout) is not None


def test_generation_and_plain_calls_are_what_they_were(build, pairs):
    """With padding, and after the model's attention has learnt of segments."""
    for name in ("llama", "gemma2", "gemma3", "gpt2"):
        model = build(name).eval()
        ids, mask = pairs["input_ids"], pairs["attention_mask"]
        options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
        with torch.no_grad():
            before = model(ids, attention_mask=mask).logits, model.generate(ids, **options)
            response_logprobs(model, **pairs, layout="shared")
            after = model(ids, attention_mask=mask).logits, model.generate(ids, **options)
        assert before[0].equal(after[0])
        assert before[1].equal(after[1])


def test_padding_that_predicts_is_left_to_the_padded_layout(build):
    batch = rows_of([(0, PROMPT, 5), (0, PROMPT, 9)])
    batch["labels"] = batch["input_ids"].where(batch["attention_mask"].bool(), -100)
    model = build("llama")
    assert runs(model, batch, "shared") is None
    assert_same(model, batch, "shared", 1e-5)


def test_an_unknown_layout_is_refused(build, pairs):
    with pytest.raises(ValueError, match="unknown layout 'flat': choose one of auto, padded"):
        response_logprobs(build("llama"), **pairs, layout="flat")
