"""f-DPO and chi-PO by hand, at the divergences they end in, and where exponentials overflow."""

import math

import pytest
import torch
from hypothesis import given
from losses.small_pairs import BETA, PAIRS, SMOOTHING, columns, numbers, pair, slopes
from torch.testing import assert_close

from lit_align.losses import (
    chi_po_loss,
    dpo_alpha_loss,
    dpo_forward_kl_loss,
    dpo_js_loss,
    dpo_loss,
)
from lit_align.losses.pairs import tangent_expm1

LOG2 = math.log(2)


def assert_same(one, other, **tolerance):
    for part, expected in zip(one, other, strict=True):
        assert_close(part, expected, **tolerance)


@pytest.mark.parametrize(
    ("loss", "rewards"),
    [
        # The policy has made the chosen response twice as likely, the other half as likely.
        (dpo_forward_kl_loss, (1 - 1 / 2, 1 - 2)),
        (dpo_js_loss, (math.log(4 / 3), math.log(2 / 3))),
        (dpo_alpha_loss, (2 * (1 - 2**-0.5), 2 * (1 - 2**0.5))),
        (chi_po_loss, (LOG2 + 1, -LOG2 - 1 / 2)),
    ],
)
def test_rewards_by_hand(loss, rewards):
    losses, chosen, rejected = loss(*pair(LOG2, -LOG2), beta=0.5)
    assert_close(chosen, numbers(0.5 * rewards[0]))
    assert_close(rejected, numbers(0.5 * rewards[1]))
    lead = 0.5 * (rewards[0] - rewards[1])
    assert_close(losses, numbers(math.log1p(math.exp(-lead))))


@pytest.mark.parametrize("loss", [dpo_forward_kl_loss, dpo_js_loss, dpo_alpha_loss])
def test_labels_are_smoothed_as_in_dpo(loss):
    plain, chosen, rejected = loss(*pair(LOG2, -LOG2), beta=0.5)
    smoothed, *_ = loss(*pair(LOG2, -LOG2), beta=0.5, label_smoothing=0.2)
    assert_close(smoothed, plain + 0.2 * (chosen - rejected))


@given(PAIRS, BETA, SMOOTHING)
def test_alpha_0_is_the_reverse_kl_and_alpha_1_the_forward_kl(pairs, beta, smoothing):
    options = {"beta": beta, "label_smoothing": smoothing}
    of_alpha = {a: dpo_alpha_loss(*columns(pairs), alpha=a, **options) for a in (0, 1e-9, 1)}
    assert_same(of_alpha[0], dpo_loss(*columns(pairs), **options))
    assert_same(of_alpha[1e-9], of_alpha[0], rtol=1e-6, atol=1e-6)
    assert_same(of_alpha[1], dpo_forward_kl_loss(*columns(pairs), **options))


@pytest.mark.parametrize("loss", [dpo_forward_kl_loss, dpo_js_loss, dpo_alpha_loss, chi_po_loss])
def test_all_start_like_dpo(loss):
    # f'' is 1 at 1, or for Jensen-Shannon 1/2 and for chi-PO 2: the slope of the reward.
    slope = {dpo_js_loss: 0.5, chi_po_loss: 2.0}.get(loss, 1.0)
    expected = slope * torch.stack(slopes(dpo_loss, 0, 0, beta=0.3))
    assert_close(torch.stack(slopes(loss, 0, 0, beta=0.3)), expected)


@given(PAIRS)
def test_rewards_of_jensen_shannon_are_bounded_above(pairs):
    _, *rewards = dpo_js_loss(*columns(pairs), beta=0.3)
    assert all((reward <= 0.3 * LOG2).all() for reward in rewards)


def test_chi_po_cuts_its_margin_at_twice_the_largest_reward():
    # Rewards 1 + e - 1 = e and 0, a margin beyond 2 * 1: the loss of 2, and no slope.
    assert_close(chi_po_loss(*pair(1, 0), beta=1.0, r_max=1.0).losses, numbers(0.1269280110429726))
    assert_close(torch.stack(slopes(chi_po_loss, 1, 0, beta=1.0, r_max=1.0)), numbers([0], [0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_exponential_goes_on_as_its_tangent(dtype):
    x = torch.tensor([-1e4, 0.0, 1.0, 50.0, 51.0, 1e4], dtype=dtype, requires_grad=True)
    values = tangent_expm1(x)
    slope = torch.autograd.grad(values.sum(), x)[0]
    e50 = math.exp(50)
    expected = [-1, 0, math.e - 1, e50, 2 * e50, (1e4 - 49) * e50]
    assert_close(values, torch.tensor(expected, dtype=dtype), rtol=1e-5, atol=1e-6)
    assert_close(slope, torch.tensor([0, 1, math.e, e50, e50, e50], dtype=dtype), rtol=1e-5, atol=0)


@pytest.mark.parametrize("loss", [dpo_forward_kl_loss, dpo_alpha_loss])
def test_a_chosen_response_that_was_lost_is_still_pulled_back(loss):
    """A bound would leave it without a gradient."""
    lost, _ = slopes(loss, -300, 0)
    assert lost < 0
