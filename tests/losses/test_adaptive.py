"""A beta for each step, and pairs that are left out by lot."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from losses.small_pairs import BETA, PAIRS, columns, numbers
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import RUNNING, DPOConfig, beta_dpo_loss, dpo_loss, moments

ALL = {"filtered_share": 0.0}


def softplus(x):
    return math.log1p(math.exp(x))


def draws(rows):
    return torch.linspace(0.2, 0.8, rows, dtype=torch.float64)


def leads(*values):
    """Pairs whose log-ratios lead by so much."""
    return columns([(value - 5.0, -5.0, -5.0, -5.0) for value in values])


def test_beta_dpo_by_hand():
    # Leads 4 and 2, of mean 3. With a momentum of 0.9 and 5 before, the mean is 4.8, and the beta
    # 0.1 * (1 + 0.5 * (3 - 4.8)) = 0.01. Margins are 0.04 and 0.02.
    rows = leads(4, 2)
    found = beta_dpo_loss(*rows, draws(2), numbers(5.0)[0], numbers(1.0)[0], alpha=0.5, **ALL)
    assert_close(found.losses, numbers(softplus(-0.04), softplus(-0.02)))
    # Rewards have the beta that does not vary.
    assert_close(found.chosen_rewards, numbers(0.4, 0.2))
    assert_close(found.rejected_rewards, numbers(0.0, 0.0))


def test_the_pair_far_from_the_usual_lead_is_left_out_and_the_others_make_the_mean():
    # A mean of 1 and a width of 0.1: leads of 1 are near it, 9 is not, whatever the lot says.
    rows = leads(1, 9, 1, 1)
    told = {"lead_mean": numbers(1.0)[0], "lead_std": numbers(0.1)[0], "momentum": 0.999}
    losses = beta_dpo_loss(*rows, draws(4), alpha=0.0, filtered_share=0.25, **told).losses
    assert_close(losses, numbers(1, 0, 1, 1) * softplus(-0.1) * 4 / 3)
    assert_close(losses.mean(), numbers(softplus(-0.1))[0])


def test_beta_has_a_floor():
    # 0.1 * (1 + 0.6 * (0 - 90)) would be far below 0.
    losses = beta_dpo_loss(*leads(0, 0), draws(2), numbers(100.0)[0], numbers(1.0)[0], **ALL).losses
    assert_close(losses, numbers(math.log(2), math.log(2)))
    slopes = leads(2, 2)
    policy = slopes[0].requires_grad_()
    losses = beta_dpo_loss(policy, *slopes[1:], draws(2), numbers(100.0)[0], numbers(1.0)[0], **ALL)
    gradient = torch.autograd.grad(losses.losses.sum(), policy)[0]
    assert_close(gradient, numbers(-1e-3, -1e-3) / (1 + math.exp(2e-3)))


@given(PAIRS, BETA)
def test_without_scale_and_filter_it_is_dpo(pairs, beta):
    rows = columns(pairs)
    found = beta_dpo_loss(*rows, draws(len(pairs)), beta=beta, alpha=0.0, **ALL)
    for part, expected in zip(found, dpo_loss(*rows, beta=beta), strict=True):
        assert_close(part, expected)


@given(PAIRS, st.floats(-50, 50))
def test_a_shift_of_both_log_probs_of_a_response_changes_nothing(pairs, shift):
    w, l, ref_w, ref_l = columns(pairs)
    lot = draws(len(pairs))
    found = beta_dpo_loss(w + shift, l, ref_w + shift, ref_l, lot).losses
    assert_close(found, beta_dpo_loss(w, l, ref_w, ref_l, lot).losses)


@given(PAIRS)
def test_rows_in_another_order_have_the_same_losses(pairs):
    """The lot belongs to the row."""
    rows, lot = columns(pairs), draws(len(pairs))
    turned = beta_dpo_loss(*(c.flip(0) for c in rows), lot.flip(0)).losses
    assert_close(turned.flip(0), beta_dpo_loss(*rows, lot).losses)


def test_pairs_are_kept_as_often_as_their_weight_says():
    """One of two is kept: exp(-d^2 / 2) of the one over the sum of both, d its distance."""
    rows, told = leads(0, 1), {"lead_mean": numbers(0.0)[0], "lead_std": numbers(1.0)[0]}
    lots = torch.rand(4000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = sum(
        beta_dpo_loss(*rows, lot, filtered_share=0.5, momentum=0.999999, **told).losses > 0
        for lot in lots
    )
    far = math.exp(-0.5)
    assert_close(kept.double() / len(lots), numbers(1, far) / (1 + far), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("rows", "share", "kept"), [(1, 0.9, 1), (5, 0.2, 4), (10, 0.9, 1), (20, 0.9, 2), (7, 0.0, 7)]
)
def test_a_share_is_left_out_and_at_least_one_is_kept(rows, share, kept):
    losses = beta_dpo_loss(*leads(*range(rows)), draws(rows), filtered_share=share).losses
    assert (losses > 0).sum() == kept


def test_a_policy_that_has_not_moved_has_no_width_and_log_2():
    losses = beta_dpo_loss(*leads(0, 0, 0, 0, 0), draws(5)).losses
    assert_close(losses.sort().values, numbers(0, 1, 1, 1, 1) * math.log(2) * 5 / 4)


def test_no_pairs_have_no_losses():
    assert beta_dpo_loss(*(torch.zeros(0) for _ in range(5))).losses.shape == (0,)


@pytest.mark.parametrize(
    ("option", "value"), [("filtered_share", 1.0), ("momentum", 1.0), ("alpha", -0.1), ("beta", 0)]
)
def test_what_makes_no_sense_is_refused(option, value):
    with pytest.raises(UserError, match=f"loss 'beta_dpo': {option} must be"):
        DPOConfig("beta_dpo", **{option: value})


def test_running_numbers_are_those_of_the_papers():
    """Two steps with leads 1, 3 and 5, 5, at beta 0.5; rewards are half of log-ratios."""
    config = DPOConfig("beta_dpo", beta=0.5)
    steps = [beta_dpo_loss(*leads(*values), draws(2), beta=0.5) for values in ((1, 3), (5, 5))]
    found = {}
    for name, running in RUNNING.items():
        state = running.start
        for pair in steps:
            state = running.after(state, moments(running.values(config, pair)), config)
        found[name] = float(running.read(state))
    # The mean of 0.5, 1.5, 2.5, 2.5 and four zeros.
    assert found["delta"] == pytest.approx(7 / 8)
    assert found["lead_mean"] == pytest.approx(0.9 * (0.1 * 2) + 0.1 * 5)
    assert found["lead_std"] == pytest.approx(0.9 * (0.1 * math.sqrt(2)))


@given(PAIRS, PAIRS)
def test_moments_add_up(some, others):
    values = [columns(rows)[0] for rows in (some, others)]
    assert_close(moments(values[0]) + moments(values[1]), moments(torch.cat(values)))
