import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.logprobs.head import Head, chunk_rows, chunked_terms, token_terms


def test_token_terms_by_hand():
    # p = (1/2, 1/4, 1/4): log p(1) = -log 4; H = (1/2) log 2 + 2 (1/4) log 4 = (3/2) log 2;
    # sum p^2 = 1/4 + 1/16 + 1/16 = 3/8; max p = 1/2.
    logits = torch.tensor([[2.0, 1.0, 1.0]], dtype=torch.float64).log()
    sampled = token_terms(logits, torch.tensor([1]), entropy=True, alignment="sampled")
    greedy = token_terms(logits, torch.tensor([1]), alignment="greedy")
    assert sampled.logprobs.item() == pytest.approx(-math.log(4), abs=1e-15)
    assert sampled.entropy.item() == pytest.approx(1.5 * math.log(2), abs=1e-15)
    assert sampled.alignment.item() == pytest.approx(math.log(3 / 8), abs=1e-15)
    assert greedy.alignment.item() == pytest.approx(-math.log(2), abs=1e-15)
    assert greedy.entropy is None


def test_temperature_divides_the_logits_by_hand():
    # Logits (log 4, 0) at temperature 2 are (log 2, 0): p = (2/3, 1/3).
    terms = token_terms(
        torch.tensor([4.0, 1.0]).log(),
        torch.tensor(0),
        temperature=2.0,
        entropy=True,
        alignment="greedy",
    )
    assert terms.logprobs.item() == pytest.approx(math.log(2 / 3))
    assert terms.alignment.item() == pytest.approx(math.log(2 / 3))
    entropy = -2 / 3 * math.log(2 / 3) - 1 / 3 * math.log(1 / 3)
    assert terms.entropy.item() == pytest.approx(entropy)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0, 3)])
def test_any_leading_shape_is_kept(shape):
    logits = torch.randn(*shape, 7)
    terms = token_terms(
        logits, torch.zeros(shape, dtype=torch.long), statistics=True, alignment="sampled"
    )
    assert all(part.shape == shape for part in terms)


@settings(deadline=None)
@given(st.floats(-1e4, 1e4), st.floats(0.2, 5.0))
def test_a_shift_of_all_logits_changes_nothing(shift, temperature):
    logits = torch.linspace(-3, 2, 12, dtype=torch.float64).view(3, 4)
    targets = torch.tensor([0, 1, 3])
    options = {"temperature": temperature, "entropy": True, "alignment": "sampled"}
    plain = token_terms(logits, targets, **options)
    shifted = token_terms(logits + shift, targets, **options)
    for name in ("logprobs", "entropy", "alignment"):
        assert_close(getattr(plain, name), getattr(shifted, name), rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(st.integers(0, 2**31))
def test_alignments_lie_between_uniform_and_certain_and_greedy_is_the_larger(seed):
    # sum p^2 <= max p, and both lie between 1/V and 1.
    logits = 5 * torch.randn(4, 9, generator=torch.Generator().manual_seed(seed)).double()
    targets = torch.zeros(4, dtype=torch.long)
    sampled, greedy = (
        token_terms(logits, targets, alignment=kind).alignment for kind in ("sampled", "greedy")
    )
    assert (sampled <= greedy + 1e-12).all()
    assert (sampled >= -math.log(9) - 1e-12).all()
    assert (greedy <= 1e-12).all()


def test_impossible_tokens_leave_entropy_and_alignment_finite():
    # Two of four tokens are barred: p = (1/2, 1/2, 0, 0).
    logits = torch.tensor([0.0, 0.0, -math.inf, -math.inf])
    terms = token_terms(logits, torch.tensor(0), entropy=True, alignment="sampled")
    assert terms.entropy.item() == pytest.approx(math.log(2))
    assert terms.alignment.item() == pytest.approx(-math.log(2))
    assert token_terms(logits, torch.tensor(2)).logprobs.item() == -math.inf


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_summed_in_float32(dtype):
    logits = (3 * torch.randn(5, 4000, generator=torch.Generator().manual_seed(0))).to(dtype)
    targets = torch.arange(5)
    terms = token_terms(logits, targets, alignment="sampled", statistics=True)
    exact = token_terms(logits.double(), targets, alignment="sampled", statistics=True)
    for found, right in zip(terms, exact, strict=True):
        assert found.dtype == torch.float32
        assert_close(found.double(), right.double(), rtol=1e-5, atol=1e-5)


def test_only_logprobs_carry_a_gradient():
    logits = torch.randn(3, 5, requires_grad=True)
    terms = token_terms(logits, torch.tensor([0, 1, 2]), entropy=True, alignment="greedy")
    assert terms.logprobs.requires_grad
    assert not terms.entropy.requires_grad
    assert not terms.alignment.requires_grad


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be positive"):
        token_terms(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), temperature=temperature)


def test_an_unknown_alignment_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'none': choose one of sampled, greedy"):
        token_terms(torch.zeros(1, 2), torch.zeros(1, dtype=torch.long), alignment="none")


def test_head_scales_then_caps_by_hand():
    # 2 * tanh(0.5 * 4 / 2) = 2 tanh(1).
    head = Head(torch.nn.Identity(), scale=0.5, softcap=2.0)
    assert head(torch.tensor([4.0])).item() == pytest.approx(2 * math.tanh(1))


def test_statistics_by_hand():
    # Logits (log 4, log 2, 0) at temperature 2 are (log 2, (1/2) log 2, 0): their mean is
    # (1/2) log 2, and the first token is the likeliest.
    logits = torch.tensor([[4.0, 2.0, 1.0]], dtype=torch.float64).log().repeat(2, 1)
    terms = token_terms(logits, torch.tensor([0, 1]), temperature=2.0, statistics=True)
    assert terms.mean_logit.tolist() == pytest.approx([0.5 * math.log(2)] * 2)
    assert terms.is_likeliest.tolist() == [1.0, 0.0]
    p = torch.tensor([2.0, math.sqrt(2), 1.0], dtype=torch.float64)
    p /= p.sum()
    assert terms.entropy[0].item() == pytest.approx(-(p * p.log()).sum().item())
    assert token_terms(logits, torch.tensor([0, 1])).mean_logit is None


HEADS = {
    "bare": Head,
    "scaled": lambda project: Head(project, scale=0.6),
    "capped": lambda project: Head(project, scale=1.5, softcap=2.0),
    # Not a linear layer, and its own backward pass reads what it has made.
    "bounded": lambda project: Head(torch.nn.Sequential(project, torch.nn.Tanh()), scale=3.0),
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_chunks_of_any_size_give_one_result(chunk_size, head, temperature):
    torch.manual_seed(0)
    linear = torch.nn.Linear(6, 11).double()
    hidden = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (7,))
    weights = torch.randn(7, dtype=torch.float64)
    options = {"temperature": temperature, "alignment": "sampled", "statistics": True}
    head = HEADS[head](linear)
    whole = token_terms(head(hidden), targets, **options)
    right = torch.autograd.grad((weights * whole.logprobs).sum(), [hidden, *linear.parameters()])
    parts = chunked_terms(head, hidden, targets, chunk_size=chunk_size, **options)
    found = torch.autograd.grad((weights * parts.logprobs).sum(), [hidden, *linear.parameters()])
    assert_close(tuple(parts), tuple(whole), rtol=1e-12, atol=1e-12)
    assert_close(found, right, rtol=1e-12, atol=1e-12)
    assert not any(part.requires_grad for part in parts[1:])


@settings(deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 30.0), st.floats(-1e3, 1e3))
def test_chunks_keep_float32_exact_at_any_scale_and_shift(seed, scale, shift):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(4, 5000, generator=generator) + shift).requires_grad_()
    targets = torch.randint(5000, (4,), generator=generator)
    options = {"alignment": "sampled", "statistics": True}
    # What is projected is read here again: the head is not to be overwritten.
    found = chunked_terms(Head(torch.nn.Identity()), logits, targets, chunk_size=3, **options)
    exact_logits = logits.detach().double().requires_grad_()
    right = token_terms(exact_logits, targets, **options)
    for one, other in zip(found, right, strict=True):
        assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(found.logprobs.sum(), logits)
    (exact,) = torch.autograd.grad(right.logprobs.sum(), exact_logits)
    assert (gradient.double() - exact).norm() < 1e-6 * exact.norm()


def test_impossible_tokens_leave_chunks_finite():
    # Two of four tokens are barred: p = (1/2, 1/2, 0, 0).
    bias = torch.tensor([0.0, 0.0, -math.inf, -math.inf])
    hidden = torch.zeros(2, 4, requires_grad=True)
    options = {"chunk_size": 1, "entropy": True, "alignment": "sampled"}
    head = Head(lambda rows: rows + bias)
    terms = chunked_terms(head, hidden, torch.tensor([0, 1]), **options)
    assert_close(terms.entropy, torch.full((2,), math.log(2)))
    assert_close(terms.alignment, torch.full((2,), -math.log(2)))
    terms.logprobs.sum().backward()
    assert_close(hidden.grad, torch.tensor([[0.5, -0.5, 0.0, 0.0], [-0.5, 0.5, 0.0, 0.0]]))


def test_dropout_in_the_head_is_the_same_in_both_passes():
    """What adapters have; the backward pass projects the first chunk again."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(6, 11)
    hidden, targets = torch.randn(4, 6, requires_grad=True), torch.tensor([0, 1, 2, 3])
    drops = []

    def project(rows):
        drops.append(torch.nn.functional.dropout(torch.ones_like(rows)))
        return linear(rows * drops[-1])

    terms = chunked_terms(Head(project), hidden, targets, chunk_size=2)
    (found,) = torch.autograd.grad(terms.logprobs.sum(), hidden)
    assert len(drops) == 3
    assert torch.equal(drops[0], drops[2])
    right = token_terms(linear(hidden * torch.cat(drops[:2])), targets)
    assert_close(found, *torch.autograd.grad(right.logprobs.sum(), hidden))


def test_a_second_backward_pass_is_right_or_refused():
    """The last chunk's logits have made room for their gradient."""
    linear = torch.nn.Linear(4, 9)
    hidden, targets = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    loss = chunked_terms(Head(linear), hidden, targets, chunk_size=2).logprobs.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = chunked_terms(Head(linear.__call__), hidden, targets, chunk_size=2).logprobs.sum()
    once, twice = (torch.autograd.grad(loss, linear.weight, retain_graph=True) for _ in range(2))
    assert torch.equal(once[0], twice[0])


def test_a_head_that_is_listened_to_is_not_overwritten():
    linear = torch.nn.Linear(4, 9)
    heard = []
    linear.register_forward_hook(lambda module, inputs, output: heard.append(output))
    hidden, targets = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    chunked_terms(Head(linear), hidden, targets, chunk_size=100).logprobs.sum().backward()
    assert_close(heard[0], linear(hidden))


def test_the_backward_pass_projects_all_chunks_but_the_last_again_instead_of_keeping_logits():
    calls = []

    class Counting(torch.nn.Linear):
        def forward(self, hidden):
            calls.append(len(hidden))
            return super().forward(hidden)

    terms = chunked_terms(
        Head(Counting(4, 9)), torch.randn(5, 4), torch.zeros(5, dtype=torch.long), chunk_size=2
    )
    assert calls == [2, 2, 1]
    terms.logprobs.sum().backward()
    assert calls == [2, 2, 1, 2, 2]


def test_the_backward_pass_computes_no_term_again():
    calls = []

    class Watched(Head):
        def finish(self, projected):
            calls.append(torch.is_grad_enabled())
            return super().finish(projected)

    options = {"chunk_size": 2, "statistics": True}
    head = Watched(torch.nn.Linear(4, 9))
    terms = chunked_terms(head, torch.randn(5, 4), torch.zeros(5, dtype=torch.long), **options)
    assert calls == [False] * 3
    terms.logprobs.sum().backward()
    assert calls == [False] * 3 + [True] * 3


def test_a_chunk_has_the_rows_that_its_budget_holds():
    # 4 bytes a logit: 100 rows of 1000; a vocabulary that leaves room for fewer than 64 gets 64.
    assert chunk_rows(1000, 400_000) == 100
    assert chunk_rows(50_000, 400_000) == 64


def test_a_chunk_size_below_one_is_refused():
    with pytest.raises(ValueError, match="chunk_size"):
        chunked_terms(Head(torch.nn.Identity()), torch.zeros(1, 2), torch.zeros(1), chunk_size=0)
