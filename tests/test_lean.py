"""Lean models against the same models as they came."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from lit_align.lean import again, make_lean, undo_lean

# What peft 0.21 reads of a model, transformers 5.24 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=4),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=8),
    "gemma2": lambda: Gemma2Config(**SHAPE, head_dim=8),
    "gpt2": lambda: GPT2Config(
        vocab_size=61,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}
IDS = torch.arange(1, 25).view(2, 12)


def build(name, **options):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), **options)
    for parameter in model.parameters():
        # Norms begin with ones or zeros: a lost weight would not show.
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.train()


def logits(model):
    return model(IDS, use_cache=False).logits.float()


def gradients(model):
    model.zero_grad()
    (logits(model).log_softmax(-1)[..., :5].sum() / 100).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_same(found, right, tolerance=1e-6):
    assert found.keys() == right.keys()
    for name, gradient in right.items():
        assert gradient.norm() > 0, name
        difference = (found[name] - gradient).norm() / gradient.norm()
        assert difference <= tolerance, f"{name}: {difference}"


def others_of(model):
    """Copies that have to be as lean, and to read their own weights."""
    return copy.deepcopy(model), pickle.loads(pickle.dumps(model))


def is_lean(model):
    return any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("autocast", [False, True])
def test_values_are_equal_and_gradients_too(family, autocast):
    model = build(family)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        right, right_gradients = logits(model), gradients(model)
        names = make_lean(model)
        # Each layer's norms, the last one and the gated layers.
        assert len(names) >= 5
        assert torch.equal(logits(model), right)
        # Sums in another order, of which some are rounded to bfloat16: by half a unit of 2^-7.
        assert_same(gradients(model), right_gradients, 2**-8 if autocast else 1e-6)


@pytest.mark.parametrize("family", CONFIGS)
def test_in_float64_only_the_order_of_sums_differs(family):
    model = build(family, dtype=torch.float64)
    right = gradients(model)
    make_lean(model)
    # Norms compute in float32 by themselves.
    assert_same(gradients(model), right, 1e-7)


def test_copies_and_pickles_are_as_lean_and_read_their_own_weights():
    model = build("llama")
    make_lean(model)
    right, first = gradients(model), logits(model)
    for other in others_of(model):
        assert is_lean(other)
        assert_same(gradients(other), right, 0)
        for parameter in other.parameters():
            parameter.data.mul_(1.1)
        assert not torch.allclose(logits(other), first)
    assert torch.equal(logits(model), first)


def test_names_and_state_stay_and_it_can_be_undone():
    model = build("qwen3")
    state, right = copy.deepcopy(model.state_dict()), gradients(model)
    names = make_lean(model)
    assert "model.layers.0.mlp" in names
    assert "model.layers.1.self_attn.q_norm" in names
    assert make_lean(model) == []
    assert model.state_dict().keys() == state.keys()
    undo_lean(model)
    assert not is_lean(model)
    assert_same(gradients(model), right, 0)


class Counting(TorchDispatchMode):
    """Remembers what was made, as long as it lives."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self.made[storage._weak_ref()] = storage.nbytes()
        return result

    def held(self):
        alive = {r: n for r, n in self.made.items() if not torch.UntypedStorage._expired(r)}
        return sum(alive.values())


@pytest.mark.parametrize("autocast", [False, True])
def test_about_half_is_kept(autocast):
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE | {"hidden_size": 64, "intermediate_size": 192})
    model = AutoModelForCausalLM.from_config(config).train()
    body = model.model
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        before = held_by(body)
        make_lean(body)
        after = held_by(body)
    assert after < (0.6 if not autocast else 0.75) * before


def held_by(body):
    gc.collect()
    counting = Counting()
    ids = torch.arange(1, 61).repeat(2, 4)
    with counting:
        out = body(input_ids=ids, use_cache=False).last_hidden_state
    held = counting.held()
    out.sum().backward()
    return held


def test_gradient_checkpointing_decides_what_is_kept():
    model = build("llama")
    right = gradients(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    held = held_by(model.model)
    make_lean(model)
    assert held_by(model.model) <= held
    assert_same(gradients(model), right, 1e-6)


def test_adapters_on_every_projection_get_their_gradients():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(build("llama"), config)
    right = gradients(model)
    assert any("down_proj.lora_A" in name for name in right)
    make_lean(model)
    assert_same(gradients(model), right)


def test_an_activation_with_weights_gets_its_gradients():
    config = LlamaConfig(**SHAPE, hidden_act="prelu")
    model = AutoModelForCausalLM.from_config(config)
    right = gradients(model)
    make_lean(model)
    assert any("act_fn" in name for name in right)
    assert_same(gradients(model), right)


def test_a_model_made_lean_can_be_given_adapters():
    peft = pytest.importorskip("peft")
    model = build("llama")
    make_lean(model)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    found = gradients(model)
    undo_lean(model)
    assert_same(found, gradients(model))


def test_without_gradients_nothing_is_computed_twice():
    model = build("llama")
    make_lean(model)
    calls = []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        logits(model)
    assert len(calls) == 1
    gradients(model)
    assert len(calls) == 3


def test_two_backward_passes_through_one_graph_are_equal():
    model = build("llama")
    make_lean(model)
    loss = logits(model).log_softmax(-1)[..., 0].sum()
    weights = [*model.parameters()]
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    second = torch.autograd.grad(loss, weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_goes_on_with_a_value_in_its_place_is_not_mistaken_for_it():
    """Here the linear layer reads a changed value: the one that is kept must not come back."""
    norm, linear = nn.RMSNorm(4), nn.Linear(4, 3)
    hidden = torch.randn(2, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def loss():
        return linear(norm(hidden).mul_(2)).square().sum()

    right = torch.autograd.grad(loss(), [hidden, linear.weight])
    model = nn.ModuleList([norm, linear])
    assert make_lean(model) == ["0"]
    found = torch.autograd.grad(loss(), [hidden, linear.weight])
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


def test_weights_as_large_as_a_value_are_not_mistaken_for_it():
    norm, linear = nn.RMSNorm(4), nn.Linear(4, 1)
    hidden = torch.randn(1, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    right = torch.autograd.grad(linear(norm(hidden)).square().sum(), [hidden, linear.weight])
    make_lean(nn.ModuleList([norm, linear]))
    found = torch.autograd.grad(linear(norm(hidden)).square().sum(), [hidden, linear.weight])
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


class Odd(nn.Module):
    """Has the parts of a gated layer and does something else with them."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(4, 6), nn.Linear(4, 6)
        self.down_proj, self.act_fn = nn.Linear(6, 4), nn.SiLU()

    def forward(self, hidden):
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) + self.up_proj(hidden))


def test_a_layer_that_gives_something_else_at_the_trial_is_left_alone():
    odd = Odd()
    assert make_lean(odd) == []
    assert "forward" not in vars(odd)


def test_a_forward_that_somebody_else_has_put_there_stays():
    norm = nn.RMSNorm(4)
    own = norm.forward = lambda hidden: hidden
    assert make_lean(norm) == []
    undo_lean(norm)
    assert norm.forward is own


def test_under_a_checkpoint_nothing_is_computed_a_third_time():
    calls = []

    def square(values):
        calls.append(1)
        return values * values

    source = torch.ones(3, requires_grad=True)
    checkpoint(lambda s: again(square, s).exp(), source, use_reentrant=False).sum().backward()
    assert len(calls) == 2
    torch.testing.assert_close(source.grad, 2 * torch.ones(3) * torch.e)
