"""DPOP, ODPO and R-DPO: by hand, as what they add to DPO, and where they must refuse."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from losses.small_pairs import BETA, PAIRS, columns, numbers, pair, slopes
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import dpo_loss, dpop_loss, odpo_loss, r_dpo_loss


def softplus(x):
    return math.log1p(math.exp(x))


# DPOP


def test_dpop_by_hand():
    # The chosen response lost 1 nat: 0.5 * (-1 - -4) - 0.5 * 2 * 1 = 0.5.
    losses, chosen, rejected = dpop_loss(*pair(-1, -4), beta=0.5, dpop_lambda=2.0)
    assert_close(losses, numbers(softplus(-0.5)))
    assert_close(chosen, numbers(-0.5 - 1.0))
    assert_close(rejected, numbers(-2.0))


@given(PAIRS, BETA, st.floats(0, 50))
def test_dpop_is_dpo_where_the_chosen_response_has_gained(pairs, beta, weight):
    w, l, ref_w, ref_l = columns(pairs)
    ahead = torch.maximum(w, ref_w)
    dpop = dpop_loss(ahead, l, ref_w, ref_l, beta=beta, dpop_lambda=weight)
    dpo = dpo_loss(ahead, l, ref_w, ref_l, beta=beta)
    for part, expected in zip(dpop, dpo, strict=True):
        assert_close(part, expected)


def test_dpop_starts_as_dpo_and_pulls_harder_once_the_chosen_response_loses():
    at_first, _ = slopes(dpop_loss, 0, 0, beta=1.0, dpop_lambda=3.0)
    assert_close(at_first, numbers(-0.5))
    # -sigmoid(-margin) * beta * (1 + lambda), at margin -1 - 3.
    later, _ = slopes(dpop_loss, -1, 0, beta=1.0, dpop_lambda=3.0)
    assert_close(later, numbers(-4 / (1 + math.exp(-4))))


# ODPO


def test_odpo_by_hand():
    # 0.5 * (1 - -1) - 2 * log 3.
    losses, chosen, _ = odpo_loss(*pair(1, -1), numbers(3.0), beta=0.5, alpha=2.0)
    assert_close(losses, numbers(softplus(2 * math.log(3) - 1)))
    assert_close(chosen, numbers(0.5))


@given(PAIRS, BETA)
def test_odpo_without_an_offset_is_dpo(pairs, beta):
    w, *others = columns(pairs)
    dpo = dpo_loss(w, *others, beta=beta).losses
    assert_close(odpo_loss(w, *others, torch.ones_like(w), beta=beta).losses, dpo)
    assert_close(odpo_loss(w, *others, torch.full_like(w, 7), beta=beta, alpha=0.0).losses, dpo)


@given(PAIRS)
def test_odpo_asks_more_of_a_pair_that_was_told_apart_more_clearly(pairs):
    w, *others = columns(pairs)
    close, far = (odpo_loss(w, *others, torch.full_like(w, m)).losses for m in (0.5, 5))
    assert (far > close).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_odpo_refuses_pairs_whose_scores_do_not_differ(bad):
    rows = [torch.zeros(3)] * 4
    with pytest.raises(UserError, match=rf"pair 1 of the batch is {bad:g}"):
        odpo_loss(*rows, torch.tensor([1.0, bad, 2.0]))


def test_whole_scores_are_margins_too():
    assert_close(
        odpo_loss(*pair(1, -1), torch.tensor([3])).losses,
        odpo_loss(*pair(1, -1), numbers(3.0)).losses,
        rtol=1e-6,
        atol=0,
    )


# R-DPO


def test_r_dpo_by_hand():
    # 0.5 * (1 - -1) + 0.1 * (12 - 7).
    losses, chosen, _ = r_dpo_loss(
        *pair(1, -1), torch.tensor([12]), torch.tensor([7]), beta=0.5, alpha=0.1
    )
    assert_close(losses, numbers(softplus(-1.5)))
    assert_close(chosen, numbers(0.5))


@given(PAIRS, BETA)
def test_r_dpo_of_equal_lengths_is_dpo(pairs, beta):
    w, *others = columns(pairs)
    lengths = torch.full(w.shape, 9)
    r_dpo = r_dpo_loss(w, *others, lengths, lengths, beta=beta, alpha=1.0).losses
    assert_close(r_dpo, dpo_loss(w, *others, beta=beta).losses)


def test_r_dpo_recovers_the_rewards_of_a_policy_that_pays_for_length():
    """Two responses, rewards 1 and 0, lengths 30 and 10: the optimum is worked out, then found.

    The policy that maximises reward - alpha * length - beta * KL has log-ratios (reward - alpha *
    length) / beta up to a constant, and labels drawn from the rewards have their least loss there.
    """
    beta, alpha, lengths = 0.5, 0.02, (torch.tensor([30]), torch.tensor([10]))
    optimum = ((1 - alpha * 30) - (0 - alpha * 10)) / beta
    preferred = 1 / (1 + math.exp(-1))

    def risk(lead):
        w, l, ref_w, ref_l = pair(lead, 0)
        options = {"beta": beta, "alpha": alpha}
        right = r_dpo_loss(w, l, ref_w, ref_l, *lengths, **options).losses
        wrong = r_dpo_loss(l, w, ref_l, ref_w, *lengths[::-1], **options).losses
        return (preferred * right + (1 - preferred) * wrong).item()

    assert risk(optimum) < min(risk(optimum - 0.1), risk(optimum + 0.1))
