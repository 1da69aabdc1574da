"""Each loss of the margin by hand, by property, and at its limits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from losses.small_pairs import BETA, PAIRS, SMOOTHING, columns, numbers, pair, slopes
from torch.testing import assert_close

from lit_align.losses import (
    DPOConfig,
    discopop_loss,
    dpo_loss,
    exo_pair_loss,
    hinge_loss,
    ipo_loss,
    robust_loss,
)

OF_THE_MARGIN = [discopop_loss, exo_pair_loss, hinge_loss, ipo_loss, robust_loss]


@pytest.mark.parametrize("loss", OF_THE_MARGIN)
@given(PAIRS, st.floats(-5, 5))
def test_what_both_responses_gain_does_not_count(loss, pairs, shift):
    w, l, ref_w, ref_l = columns(pairs)
    assert_close(
        loss(w + shift, l + shift, ref_w, ref_l).losses,
        loss(w, l, ref_w, ref_l).losses,
        rtol=1e-6,
        atol=1e-9,
    )


@pytest.mark.parametrize("loss", OF_THE_MARGIN)
@given(PAIRS, BETA)
def test_rewards_are_those_of_dpo(loss, pairs, beta):
    ours, dpo = (fn(*columns(pairs), beta=beta) for fn in (loss, dpo_loss))
    assert_close(ours.chosen_rewards, dpo.chosen_rewards)
    assert_close(ours.rejected_rewards, dpo.rejected_rewards)


# DiscoPOP


def test_discopop_by_hand():
    # At margin 0 the blend is half and half: log 2 / 2 + 1 / 2.
    losses, *_ = discopop_loss(*pair(3, 3))
    assert_close(losses, numbers((math.log(2) + 1) / 2))


def test_discopop_is_logistic_on_one_side_and_exponential_on_the_other():
    # x / tau = -+40: the other term weighs e^-40.
    for margin, expected in ((-2, math.log1p(math.exp(2))), (2, math.exp(-2))):
        losses, *_ = discopop_loss(*pair(margin, 0), beta=1.0, discopop_tau=0.05)
        assert_close(losses, numbers(expected))


@pytest.mark.parametrize("tau", [0.01, 0.05, 1.0])
@pytest.mark.parametrize("margin", [-1e4, -1e3, -100.0, 1e3, 1e4])
def test_discopop_is_finite_where_its_factors_are_not(margin, tau):
    # In float32 exp(100) is infinite, and its weight 0.
    chosen = torch.tensor([margin], requires_grad=True)
    losses, *_ = discopop_loss(chosen, *torch.zeros(3, 1), beta=1.0, discopop_tau=tau)
    (slope,) = torch.autograd.grad(losses.sum(), chosen)
    assert_close(losses, torch.tensor([max(-margin, 0.0)]), atol=1.0, rtol=0)
    assert_close(slope, torch.tensor([-1.0 if margin < 0 else 0.0]))


# EXO


def test_exo_by_hand():
    # At margin 0: log(1/2) - (log 0.9 + log 0.1) / 2.
    losses, *_ = exo_pair_loss(*pair(3, 3), label_smoothing=0.1)
    assert_close(losses, numbers(-math.log(2) - math.log(0.09) / 2))


@given(PAIRS, st.floats(0.001, 0.4))
def test_exo_is_0_where_the_policy_says_what_the_labels_say_and_nowhere_less(pairs, smoothing):
    *_, ref_w, ref_l = columns(pairs)
    there = math.log((1 - smoothing) / smoothing)
    at = exo_pair_loss(ref_w + there, ref_l, ref_w, ref_l, beta=1.0, label_smoothing=smoothing)
    assert_close(at.losses, torch.zeros_like(at.losses), rtol=0, atol=1e-9)
    anywhere = exo_pair_loss(*columns(pairs), beta=1.0, label_smoothing=smoothing).losses
    assert (anywhere >= -1e-12).all()


@given(PAIRS)
def test_exo_of_almost_certain_labels_counts_the_probability_of_the_other(pairs):
    """Over log(1 / eps), in the limit: 1 - sigmoid(margin)."""
    chosen, rejected, ref_w, ref_l = (logps / 10 for logps in columns(pairs))
    eps = 1e-300
    losses = exo_pair_loss(chosen, rejected, ref_w, ref_l, beta=0.5, label_smoothing=eps).losses
    margin = 0.5 * (chosen - ref_w - rejected + ref_l)
    assert_close(losses / -math.log(eps), (-margin).sigmoid(), rtol=0, atol=2e-3)


# hinge


def test_hinge_by_hand():
    # 1 - 0.1 * (3 - -2) = 0.5; a lead of 10 is enough.
    assert_close(hinge_loss(*pair(3, -2), beta=0.1).losses, numbers(0.5))
    assert_close(hinge_loss(*pair(8, -2.5), beta=0.1).losses, numbers(0.0))
    assert_close(torch.stack(slopes(hinge_loss, 3, -2, beta=0.1)), numbers([-0.1], [0.1]))


@given(PAIRS, BETA)
def test_hinge_is_0_from_a_lead_of_1_over_beta_on(pairs, beta):
    *_, ref_w, ref_l = columns(pairs)
    losses, *_ = hinge_loss(ref_w + 1.001 / beta, ref_l, ref_w, ref_l, beta=beta)
    assert_close(losses, torch.zeros_like(losses))


# IPO


def test_ipo_by_hand():
    # Lead 3 - -1 = 4, asked for 1 / (2 * 0.25) = 2; twice the distance is the slope.
    assert_close(ipo_loss(*pair(3, -1), beta=0.25).losses, numbers(4.0))
    assert_close(torch.stack(slopes(ipo_loss, 3, -1, beta=0.25)), numbers([4.0], [-4.0]))


@given(PAIRS, BETA)
def test_ipo_is_least_at_a_lead_of_1_over_2_beta(pairs, beta):
    *_, ref_w, ref_l = columns(pairs)
    at, short, far = (
        ipo_loss(ref_w + lead / beta, ref_l, ref_w, ref_l, beta=beta) for lead in (0.5, 0.4, 0.6)
    )
    assert_close(at.losses, torch.zeros_like(at.losses), rtol=0, atol=1e-9)
    assert_close(at.chosen_rewards, torch.full_like(at.losses, 0.5))
    assert_close(short.losses, far.losses, rtol=1e-6, atol=1e-9)


def test_ipo_reads_means_and_ipo_sum_reads_sums():
    assert DPOConfig("ipo").variant.average_logps
    assert not DPOConfig("ipo_sum").variant.average_logps
    assert DPOConfig("ipo").variant.fn is DPOConfig("ipo_sum").variant.fn


# robust


def test_robust_by_hand():
    # Margin 1: s(-1) = s(1) + 1, so (0.8 s(1) - 0.2 (s(1) + 1)) / 0.6 = s(1) - 1/3.
    losses, *_ = robust_loss(*pair(1, -1), beta=0.5, label_smoothing=0.2)
    assert_close(losses, numbers(math.log1p(math.exp(-1)) - 1 / 3))


@given(PAIRS, BETA)
def test_robust_without_flipped_labels_is_dpo(pairs, beta):
    robust = robust_loss(*columns(pairs), beta=beta, label_smoothing=0.0).losses
    assert_close(robust, dpo_loss(*columns(pairs), beta=beta).losses)


@given(PAIRS, BETA, SMOOTHING)
def test_robust_is_dpo_of_the_true_labels_on_average_and_so_is_its_gradient(pairs, beta, flips):
    """What the correction is for: pairs are shown the wrong way round with that probability."""

    def expected_over_flips(w, l, ref_w, ref_l):
        right = robust_loss(w, l, ref_w, ref_l, beta=beta, label_smoothing=flips).losses
        wrong = robust_loss(l, w, ref_l, ref_w, beta=beta, label_smoothing=flips).losses
        return (1 - flips) * right + flips * wrong

    w, l, ref_w, ref_l = columns(pairs)
    w, l = w.requires_grad_(), l.requires_grad_()
    ours = expected_over_flips(w, l, ref_w, ref_l)
    dpo = dpo_loss(w, l, ref_w, ref_l, beta=beta).losses
    assert_close(ours, dpo, rtol=1e-6, atol=1e-9)
    for gradient, of_dpo in zip(
        torch.autograd.grad(ours.sum(), (w, l)),
        torch.autograd.grad(dpo.sum(), (w, l)),
        strict=True,
    ):
        assert_close(gradient, of_dpo, rtol=1e-6, atol=1e-9)
