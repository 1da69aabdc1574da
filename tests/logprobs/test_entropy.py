"""The gradient of the entropy, against autograd over all logits at once."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.logprobs import response_logprobs, token_terms
from lit_align.logprobs.head import Head, chunked_terms

# What peft 0.21 reads of a model, transformers 5.24 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")


def of(logits, target=0, **options):
    """Terms of one prediction, the entropy with its gradient."""
    return token_terms(logits, torch.tensor(target), entropy=True, entropy_gradient=True, **options)


def test_the_gradient_by_hand():
    # p = (2/3, 1/3): dH / dz_v = -p_v * (log p_v + H), and the two cancel.
    logits = torch.tensor([math.log(2), 0.0], dtype=torch.float64, requires_grad=True)
    terms = of(logits)
    h = 2 / 3 * math.log(3 / 2) + 1 / 3 * math.log(3)
    assert terms.entropy.item() == pytest.approx(h, abs=1e-15)
    (found,) = torch.autograd.grad(terms.entropy, logits)
    slope = 1 / 3 * (math.log(3) - h)
    assert_close(found, torch.tensor([-slope, slope], dtype=torch.float64))


@settings(deadline=None)
@given(st.integers(0, 2**31), st.floats(0.3, 3.0))
def test_it_is_that_of_the_formula_at_any_temperature(seed, temperature):
    """-p * (log p + H) / temperature, which sums to 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(9, generator=generator)).double().requires_grad_()
    entropy = of(logits, temperature=temperature).entropy
    (found,) = torch.autograd.grad(entropy, logits)
    logprobs = (logits.detach() / temperature).log_softmax(-1)
    right = -logprobs.exp() * (logprobs + entropy.detach()) / temperature
    assert_close(found, right, rtol=1e-10, atol=1e-12)
    assert abs(found.sum().item()) < 1e-12


def test_it_is_0_where_all_tokens_are_as_likely_and_where_one_is_certain():
    for logits in (torch.zeros(5), torch.tensor([1e4, -1e4, 0.0, -50.0, 3.0])):
        logits.requires_grad_()
        terms = of(logits)
        (found,) = torch.autograd.grad(terms.entropy, logits)
        assert terms.entropy.isfinite()
        assert_close(found, torch.zeros(5), rtol=0, atol=1e-6)


def test_impossible_tokens_have_no_gradient_and_leave_that_of_the_others_finite():
    logits = torch.tensor([1.0, 0.0, -math.inf, -math.inf], requires_grad=True)
    (found,) = torch.autograd.grad(of(logits).entropy, logits)
    (right,) = torch.autograd.grad(of(two := logits[:2].detach().requires_grad_()).entropy, two)
    assert_close(found, torch.cat([right, torch.zeros(2)]))


def full_path(model, batch, temperature):
    """The textbook way: log-probs and entropies from all logits, in plain autograd."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    mask = batch["labels"][:, 1:] != -100
    logprobs = torch.log_softmax(logits / temperature, -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    targets = batch["labels"][:, 1:].clamp(min=0).unsqueeze(-1)
    return logprobs.gather(-1, targets).squeeze(-1).where(mask, 0.0), entropy.where(mask, 0.0)


def gradients(model, logprobs, entropy):
    """Of a loss in which each token's log-prob and entropy have weights of their own."""
    weights = torch.linspace(-1, 2, entropy.numel(), dtype=entropy.dtype).view_as(entropy)
    model.zero_grad()
    (0.3 * weights * logprobs - weights.flip(0) * entropy).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_equal_to_the_full_path(model, batch, temperature):
    logprobs, entropy = full_path(model, batch, temperature)
    right = gradients(model, logprobs, entropy)
    options = {"temperature": temperature, "entropy": True, "layout": "padded"}
    found = response_logprobs(model, **batch, **options, entropy_gradient=True, chunk_size=4)
    assert_close(found.entropy, entropy, rtol=0, atol=1e-10)
    for name, gradient in gradients(model, found.logprobs, found.entropy).items():
        scale = right[name].abs().max().item()
        assert scale > 0, name
        assert_close(gradient, right[name], rtol=0, atol=1e-10 * scale)
    constant = response_logprobs(model, **batch, **options, chunk_size=4)
    assert not constant.entropy.requires_grad
    assert torch.equal(constant.entropy, found.entropy.detach())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_give_the_gradient_of_all_logits(family, build, right_padded, temperature):
    """Scaled, capped, tied and biased heads among them."""
    assert_equal_to_the_full_path(build(family, torch.float64), right_padded, temperature)


def test_a_lora_adapter_on_the_head_gets_its_share(build, right_padded):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(build("llama", torch.float64), config).double()
    assert any("lm_head" in n for n, p in model.named_parameters() if p.requires_grad)
    assert_equal_to_the_full_path(model, right_padded, 0.7)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_impossible_tokens_leave_the_gradient_by_chunks_finite(temperature):
    bias = torch.tensor([1.0, 0.0, -math.inf, -math.inf])
    hidden = torch.zeros(2, 4, requires_grad=True)
    terms = chunked_terms(
        Head(lambda rows: rows + bias),
        hidden,
        torch.tensor([0, 1]),
        chunk_size=1,
        temperature=temperature,
        entropy=True,
        entropy_gradient=True,
    )
    logits = torch.tensor([1.0, 0.0], requires_grad=True)
    (right,) = torch.autograd.grad(of(logits, temperature=temperature).entropy, logits)
    terms.entropy.sum().backward()
    assert_close(hidden.grad, torch.cat([right, torch.zeros(2)]).expand(2, 4))


def test_a_batch_without_responses_has_gradients_of_0(build, right_padded):
    model = build("gpt2")
    labels = torch.full_like(right_padded["labels"], -100)
    found = response_logprobs(
        model, **right_padded | {"labels": labels}, entropy=True, entropy_gradient=True
    )
    found.entropy.sum().backward()
    assert all(not p.grad.any() for p in model.parameters())
