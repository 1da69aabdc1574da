"""LD-DPO by hand, by property, and at its limits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from losses.small_pairs import BETA, LOGP, PAIRS, SMOOTHING, columns, numbers
from torch.testing import assert_close

from lit_align.losses import dpo_loss, ld_dpo_loss


def softplus(x):
    return math.log1p(math.exp(x))


def test_ld_dpo_by_hand():
    # Heads -4 and -6 of -10 and -6; alpha 0.25: -5.5 and -6. The reference: -8 + -1 / 4, and -7.
    policy, reference = numbers(-10.0, -6.0), numbers(-9.0, -7.0)
    heads, reference_heads = numbers(-4.0, -6.0), numbers(-8.0, -7.0)
    given = (*policy, *reference, *heads, *reference_heads)
    losses, chosen, rejected = ld_dpo_loss(*(x[None] for x in given), beta=2.0, ld_alpha=0.25)
    assert_close(chosen, numbers(2 * (-5.5 + 8.25)))
    assert_close(rejected, numbers(2 * (-6 + 7.0)))
    assert_close(losses, numbers(softplus(-3.5)))


HEADS = st.lists(st.tuples(LOGP, LOGP, LOGP, LOGP), min_size=4, max_size=4)


@given(PAIRS, HEADS, BETA, SMOOTHING)
def test_at_1_it_is_dpo_and_at_0_dpo_of_the_heads(pairs, heads, beta, smoothing):
    logps, heads = columns(pairs), columns(heads[: len(pairs)])
    options = {"beta": beta, "label_smoothing": smoothing}
    for alpha, expected in ((1.0, logps), (0.0, heads)):
        ours = ld_dpo_loss(*logps, *heads, ld_alpha=alpha, **options)
        for part, other in zip(ours, dpo_loss(*expected, **options), strict=True):
            assert_close(part, other, rtol=1e-9, atol=1e-9)


@given(PAIRS, BETA, st.floats(0, 1))
def test_of_responses_of_one_length_it_is_dpo(pairs, beta, alpha):
    logps = columns(pairs)
    ours = ld_dpo_loss(*logps, *logps, beta=beta, ld_alpha=alpha)
    for part, other in zip(ours, dpo_loss(*logps, beta=beta), strict=True):
        assert_close(part, other)


def test_a_token_beyond_the_shorter_response_has_alpha_times_the_gradient():
    head, rest = numbers(-3.0).requires_grad_(), numbers(-5.0).requires_grad_()
    other = numbers(-4.0)
    losses = ld_dpo_loss(
        head + rest, other, other, other, head, other, other, other, ld_alpha=0.25
    ).losses
    by_head, by_rest = torch.autograd.grad(losses.sum(), (head, rest))
    assert_close(by_rest, 0.25 * by_head)


@pytest.mark.parametrize("margin", [1e4, -1e4])
def test_it_is_finite_whichever_part_of_a_response_is_far_off(margin):
    far = torch.tensor([margin], requires_grad=True)
    flat = torch.zeros(1)
    for logps in ((far, flat), (flat, far)):
        totals, heads = ([x, flat, flat, flat] for x in logps)
        pair = ld_dpo_loss(*totals, *heads, beta=1.0)
        (gradient,) = torch.autograd.grad(pair.losses.sum(), far)
        assert all(part.isfinite().all() for part in (*pair, gradient))
