"""Losses that set log-ratios a goal: by hand and by property."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from losses.small_pairs import BETA, PAIRS, columns, numbers, pair, slopes
from torch.testing import assert_close

from lit_align.losses import cal_dpo_loss, dpo_loss, sppo_hard_loss, sppo_soft_loss


@pytest.mark.parametrize("loss", [cal_dpo_loss, sppo_hard_loss, sppo_soft_loss])
@given(PAIRS, BETA)
def test_rewards_are_those_of_dpo(loss, pairs, beta):
    ours, dpo = (fn(*columns(pairs), beta=beta) for fn in (loss, dpo_loss))
    assert_close(ours.chosen_rewards, dpo.chosen_rewards)
    assert_close(ours.rejected_rewards, dpo.rejected_rewards)


def test_sppo_by_hand():
    # Asked for 2 and -2: (3 - 2)^2 + (1 + 2)^2, slopes twice the distances.
    assert_close(sppo_hard_loss(*pair(3, 1), beta=0.25).losses, numbers(10.0))
    assert_close(torch.stack(slopes(sppo_hard_loss, 3, 1, beta=0.25)), numbers([2.0], [6.0]))


@given(PAIRS, BETA)
def test_sppo_is_0_at_rewards_of_a_half(pairs, beta):
    *_, ref_w, ref_l = columns(pairs)
    at = sppo_hard_loss(ref_w + 0.5 / beta, ref_l - 0.5 / beta, ref_w, ref_l, beta=beta)
    assert_close(at.losses, torch.zeros_like(at.losses), rtol=0, atol=1e-9)
    assert_close(at.chosen_rewards, torch.full_like(at.losses, 0.5))
    assert_close(at.rejected_rewards, torch.full_like(at.losses, -0.5))


def test_sppo_of_soft_labels_by_hand():
    # Asked for 4 * (0.75 - 0.5) = 1 and -1: (3 - 1)^2 + (1 + 1)^2; a coin asks for 0 of both.
    for wins, losses, by_w, by_l in ((0.75, 8.0, 4.0, 4.0), (0.5, 10.0, 6.0, 2.0)):
        options = {"label_prob": numbers(wins), "beta": 0.25}
        assert_close(sppo_soft_loss(*pair(3, 1), **options).losses, numbers(losses))
        found = torch.stack(slopes(sppo_soft_loss, 3, 1, **options))
        assert_close(found, numbers([by_w], [by_l]))


@given(PAIRS, BETA)
def test_sppo_of_certain_labels_is_hard(pairs, beta):
    hard = sppo_hard_loss(*columns(pairs), beta=beta)
    for label_prob in (None, torch.ones_like(hard.losses)):
        soft = sppo_soft_loss(*columns(pairs), label_prob, beta=beta)
        for part, expected in zip(soft, hard, strict=True):
            assert_close(part, expected)


@given(PAIRS, BETA, st.floats(0, 1))
def test_sppo_of_soft_labels_does_not_know_its_sides(pairs, beta, wins):
    w, l, ref_w, ref_l = columns(pairs)
    wins = torch.full_like(w, wins)
    there = sppo_soft_loss(w, l, ref_w, ref_l, wins, beta=beta)
    back = sppo_soft_loss(l, w, ref_l, ref_w, 1 - wins, beta=beta)
    assert_close(there.losses, back.losses)


def test_cal_dpo_by_hand():
    # SPPO's 10 above, and the logistic loss of the plain lead, 2.
    assert_close(
        cal_dpo_loss(*pair(3, 1), beta=0.25).losses, numbers(10 + math.log1p(math.exp(-2)))
    )


@given(PAIRS, BETA)
def test_cal_dpo_is_sppo_and_dpo_at_beta_1(pairs, beta):
    sppo = sppo_hard_loss(*columns(pairs), beta=beta).losses
    dpo = dpo_loss(*columns(pairs), beta=1.0).losses
    assert_close(cal_dpo_loss(*columns(pairs), beta=beta).losses, sppo + dpo)
