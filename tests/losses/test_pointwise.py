"""Each loss of rewards by themselves, by hand and by property."""

import math

import pytest
import torch
from hypothesis import given
from losses.small_pairs import BETA, PAIRS, columns, numbers, pair, slopes
from torch.testing import assert_close

from lit_align.losses import (
    apo_down_loss,
    apo_zero_loss,
    bco_pair_loss,
    dpo_loss,
    nca_pair_loss,
)

OF_REWARDS = [
    apo_down_loss,
    apo_zero_loss,
    bco_pair_loss,
    nca_pair_loss,
]


def softplus(x):
    return math.log1p(math.exp(x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("loss", OF_REWARDS)
@given(PAIRS, BETA)
def test_rewards_are_those_of_dpo(loss, pairs, beta):
    ours, dpo = (fn(*columns(pairs), beta=beta) for fn in (loss, dpo_loss))
    assert_close(ours.chosen_rewards, dpo.chosen_rewards)
    assert_close(ours.rejected_rewards, dpo.rejected_rewards)


@pytest.mark.parametrize("loss", OF_REWARDS)
def test_where_both_responses_are_matters_not_only_their_lead(loss):
    low, high = (loss(*pair(shift + 1, shift), beta=0.5).losses for shift in (-3, 3))
    assert not torch.isclose(low, high).any()


# APO


def test_apo_by_hand():
    # Rewards 1 and -0.5.
    zero, down = (loss(*pair(2, -1), beta=0.5).losses for loss in (apo_zero_loss, apo_down_loss))
    assert_close(zero, numbers(1 - sigmoid(1) + sigmoid(-0.5)))
    assert_close(down, numbers(sigmoid(1) + 1 - sigmoid(1.5)))


def test_apo_zero_raises_the_chosen_response_and_apo_down_lowers_both():
    for w, l in ((0, 0), (2, -1), (-1, 2)):
        up, down = slopes(apo_zero_loss, w, l)
        assert up < 0 < down
    # From a lead on; without one, apo_down leaves the chosen response where it is.
    assert all(slope > 0 for slope in slopes(apo_down_loss, 2, -1))
    assert_close(slopes(apo_down_loss, 0, 0)[0], numbers(0.0))


# BCO


def test_bco_by_hand():
    # Rewards 1 and -0.5, shifted by 0.25 to 0.75 and -0.75.
    assert_close(
        bco_pair_loss(*pair(2, -1), beta=0.5).losses, numbers(softplus(-1) + softplus(-0.5))
    )
    shifted = bco_pair_loss(*pair(2, -1), numbers(0.25)[0], beta=0.5)
    assert_close(shifted.losses, numbers(2 * softplus(-0.75)))
    assert_close(shifted.chosen_rewards, numbers(1.0))


def test_the_shift_of_bco_is_a_constant_and_one_number():
    delta = torch.tensor(0.25, dtype=torch.float64, requires_grad=True)
    policy, *others = pair(2, -1)
    losses = bco_pair_loss(policy.requires_grad_(), *others, delta).losses
    (gradient,) = torch.autograd.grad(losses.sum(), delta, materialize_grads=True)
    assert gradient == 0
    with pytest.raises(ValueError, match=r"delta \(1,\)"):
        bco_pair_loss(*pair(2, -1), numbers(0.25))


# NCA


def test_nca_by_hand():
    # Rewards 1 and -0.5.
    expected = softplus(-1) + softplus(1) / 2 + softplus(-0.5) / 2
    assert_close(nca_pair_loss(*pair(2, -1), beta=0.5).losses, numbers(expected))


def test_nca_and_bco_of_an_unmoved_policy_are_2_log_2():
    for loss in (nca_pair_loss, bco_pair_loss):
        assert_close(loss(*pair(0, 0)).losses, numbers(2 * math.log(2)))
    # There the chosen response is pulled up by beta / 4, the other pushed down as much.
    assert_close(torch.stack(slopes(nca_pair_loss, 0, 0, beta=1.0)), numbers([-0.25], [0.25]))


def test_nca_holds_the_chosen_response_where_its_odds_are_2_to_1():
    up, _ = slopes(nca_pair_loss, math.log(2), 0, beta=1.0)
    assert_close(up, numbers(0.0), rtol=0, atol=1e-12)
