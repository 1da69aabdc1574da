"""Losses without a reference by hand, by property, and at their limits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from losses.small_pairs import BETA, PAIRS, SMOOTHING, columns, numbers
from torch.testing import assert_close

from lit_align.losses import (
    alphapo_loss,
    cpo_preference_loss,
    dpo_loss,
    hinge_loss,
    orpo_odds_ratio_loss,
    simper_loss,
    simpo_hinge_loss,
    simpo_loss,
    slic_calibration_loss,
)


def softplus(x):
    return math.log1p(math.exp(x))


def policies(pairs):
    return columns(pairs)[:2]


# AlphaPO


def test_alphapo_by_hand():
    # Probabilities 1/4 and 1/16 at alpha 1/2: f = (1 - 2) * 2 = -2 and (1 - 4) * 2 = -6.
    losses, chosen, rejected = alphapo_loss(
        numbers(math.log(1 / 4)),
        numbers(math.log(1 / 16)),
        beta=1.0,
        gamma_beta_ratio=3.0,
        alpha=0.5,
    )
    assert_close(chosen, numbers(-2.0))
    assert_close(rejected, numbers(-6.0))
    assert_close(losses, numbers(softplus(-1)))


@given(PAIRS, BETA, SMOOTHING)
def test_alphapo_at_alpha_0_is_simpo(pairs, beta, smoothing):
    options = {"beta": beta, "gamma_beta_ratio": 0.3, "label_smoothing": smoothing}
    simpo = simpo_loss(*policies(pairs), **options)
    for alpha, tolerance in ((0.0, 1e-12), (1e-9, 1e-6), (-1e-9, 1e-6)):
        alphapo = alphapo_loss(*policies(pairs), alpha=alpha, **options)
        for part, expected in zip(alphapo, simpo, strict=True):
            assert_close(part, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("alpha", [-2.0, 2.0])
def test_alphapo_is_finite_where_a_probability_to_the_power_of_alpha_is_not(alpha):
    policy = torch.tensor([-1e4, 0.0], requires_grad=True)
    losses, *rewards = alphapo_loss(policy, torch.tensor([0.0, -1e4]), alpha=alpha)
    (gradient,) = torch.autograd.grad(losses.sum(), policy)
    assert all(part.isfinite().all() for part in (losses, gradient, *rewards))


# CPO


def test_cpo_by_hand():
    losses, chosen, rejected = cpo_preference_loss(*policies([(-4, -6, 0, 0)]), beta=0.5)
    assert_close(losses, numbers(softplus(-1)))
    assert_close(chosen, numbers(-2.0))
    assert_close(rejected, numbers(-3.0))


@given(PAIRS, BETA, SMOOTHING)
def test_cpo_is_dpo_with_a_flat_reference(pairs, beta, smoothing):
    chosen, rejected, flat, _ = columns(pairs)
    cpo = cpo_preference_loss(chosen, rejected, beta=beta, label_smoothing=smoothing).losses
    dpo = dpo_loss(chosen, rejected, flat, flat, beta=beta, label_smoothing=smoothing).losses
    assert_close(cpo, dpo)


# ORPO


def test_orpo_by_hand():
    # Odds 3 to 1 and 1 to 3, ratio 9: -log(9 / 10).
    losses, chosen, rejected = orpo_odds_ratio_loss(
        numbers(math.log(0.75)), numbers(math.log(0.25))
    )
    assert_close(losses, numbers(math.log(10 / 9)))
    assert_close(chosen, numbers(math.log(3)))
    assert_close(rejected, numbers(-math.log(3)))


@given(PAIRS)
def test_orpo_of_equally_likely_responses_is_log_2(pairs):
    chosen, *_ = columns(pairs)
    losses, *_ = orpo_odds_ratio_loss(chosen, chosen)
    assert_close(losses, torch.full_like(chosen, math.log(2)))


@pytest.mark.parametrize("logp", [0.0, -1e-12, -1e-9, -1e-7, -1e-6, -1e-3])
def test_orpo_of_a_certain_response_is_finite_and_knows_its_direction(logp):
    # log(1 - exp(0)) is -inf, and one float32 step below 1 half of its digits are gone.
    policy = torch.full((2,), logp, requires_grad=True)
    losses, odds, _ = orpo_odds_ratio_loss(policy, torch.full((2,), -2.0))
    (gradient,) = torch.autograd.grad(losses.sum(), policy)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()
    exact = math.log(math.exp(min(logp, -1e-12)) / -math.expm1(min(logp, -1e-12)))
    assert_close(odds, torch.full((2,), exact), rtol=1e-5, atol=1e-5)


@given(st.floats(-40, -1e-6), st.floats(-40, -1e-6))
def test_orpo_with_the_sides_exchanged_has_the_odds_of_the_other_side(one, other):
    straight, turned = (
        orpo_odds_ratio_loss(numbers(a), numbers(b)) for a, b in ((one, other), (other, one))
    )
    assert_close(turned.chosen_rewards, straight.rejected_rewards)
    margin = straight.chosen_rewards - straight.rejected_rewards
    # -log sigmoid(x) + log sigmoid(-x) = -x.
    assert_close(straight.losses - turned.losses, -margin, rtol=1e-9, atol=1e-9)


# SimPER


def test_simper_by_hand():
    # Perplexities 2 and 4.
    losses, chosen, rejected = simper_loss(numbers(-math.log(2)), numbers(-math.log(4)))
    assert_close(losses, numbers(1 / 4 - 1 / 2))
    assert_close(chosen, numbers(1 / 2))
    assert_close(rejected, numbers(1 / 4))


@given(PAIRS)
def test_simper_lies_between_minus_1_and_1_and_turns_with_the_pair(pairs):
    chosen, rejected = policies(pairs)
    losses = simper_loss(chosen, rejected).losses
    assert (losses.abs() <= 1).all()
    assert_close(simper_loss(rejected, chosen).losses, -losses)


# SimPO's hinge, SLiC-HF


def test_simpo_hinge_by_hand():
    # 1 - 2 * (-1 - -1.5 - 0.25) = 0.5.
    losses, *rewards = simpo_hinge_loss(
        *policies([(-1, -1.5, 0, 0)]), beta=2.0, gamma_beta_ratio=0.25
    )
    assert_close(losses, numbers(0.5))
    assert_close(torch.cat(rewards), numbers(-2.0, -3.0))


@given(PAIRS, BETA)
def test_simpo_hinge_without_a_margin_is_hinge_with_a_flat_reference(pairs, beta):
    chosen, rejected, flat, _ = columns(pairs)
    ours = simpo_hinge_loss(chosen, rejected, beta=beta, gamma_beta_ratio=0.0).losses
    assert_close(ours, hinge_loss(chosen, rejected, flat, flat, beta=beta).losses)


def test_slic_by_hand():
    # Leads 2 and 5, asked for 3.
    losses, *rewards = slic_calibration_loss(*policies([(-4, -6, 0, 0), (-1, -6, 0, 0)]), delta=3.0)
    assert_close(losses, numbers(1.0, 0.0))
    assert_close(torch.stack(rewards), numbers([-4.0, -1.0], [-6.0, -6.0]))


@given(PAIRS, st.floats(0.1, 10))
def test_slic_is_a_hinge_with_a_flat_reference_in_units_of_its_delta(pairs, delta):
    chosen, rejected, flat, _ = columns(pairs)
    ours = slic_calibration_loss(chosen, rejected, delta=delta).losses
    assert_close(ours, delta * hinge_loss(chosen, rejected, flat, flat, beta=1 / delta).losses)
