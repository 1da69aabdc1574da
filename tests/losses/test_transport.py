"""Alignment via optimal transport: ranks, and what does not depend on the order of the rows."""

import math

import pytest
import torch
from hypothesis import given
from losses.small_pairs import BETA, PAIRS, SMOOTHING, columns, numbers
from torch.testing import assert_close

from lit_align.losses import aot_loss, aot_unpaired_loss, dpo_loss

BOTH = pytest.mark.parametrize("loss", [aot_loss, aot_unpaired_loss])


def softplus(x):
    return math.log1p(math.exp(x))


def test_aot_by_hand():
    # Leads of the policy 5 and 1, of the reference 0 and 2: 5 meets 2, 1 meets 0.
    rows = columns([(-1, -6, -3, -3), (-2, -3, -1, -3)])
    losses, chosen, rejected = aot_loss(*rows, beta=0.5)
    assert_close(losses, numbers(softplus(-1.5), softplus(-0.5)))
    assert_close(chosen, numbers(1.0, -0.5))
    assert_close(rejected, numbers(-1.5, 0.0))


def test_aot_unpaired_by_hand():
    # Log-ratios of chosen responses 2 and -1, of the others -3 and 0: 2 meets 0, -1 meets -3.
    rows = columns([(-1, -6, -3, -3), (-2, -3, -1, -3)])
    losses, *_ = aot_unpaired_loss(*rows, beta=0.5)
    assert_close(losses, numbers(softplus(-1.0), softplus(-1.0)))


@BOTH
@given(PAIRS, BETA, SMOOTHING)
def test_one_pair_is_dpo(loss, pairs, beta, smoothing):
    first = columns(pairs[:1])
    options = {"beta": beta, "label_smoothing": smoothing}
    for part, expected in zip(loss(*first, **options), dpo_loss(*first, **options), strict=True):
        assert_close(part, expected)


@BOTH
@given(PAIRS)
def test_rows_in_another_order_have_the_same_losses(loss, pairs):
    assert_close(
        loss(*columns(pairs[::-1])).losses.sort().values, loss(*columns(pairs)).losses.sort().values
    )


@BOTH
@given(PAIRS)
def test_matching_by_rank_costs_the_least(loss, pairs):
    """Of all ways to match two samples under a convex cost; DPO's is one of them."""
    matched = loss(*columns(pairs), beta=0.1).losses.mean()
    assert matched <= dpo_loss(*columns(pairs), beta=0.1).losses.mean() + 1e-9


@given(PAIRS)
def test_unpaired_does_not_ask_which_response_belongs_to_which(pairs):
    w, l, ref_w, ref_l = columns(pairs)
    turned = aot_unpaired_loss(w, l.roll(1), ref_w, ref_l.roll(1)).losses
    assert_close(turned, aot_unpaired_loss(w, l, ref_w, ref_l).losses)


def test_a_loss_stands_at_the_row_it_is_of():
    """The reference is constant, so a row's loss moves only with the row."""
    policy, *others = columns([(-1, -6, -3, -3), (-2, -3, -1, -3), (-9, -8, -1, -4)])
    policy = policy.requires_grad_()
    for row, loss in enumerate(aot_loss(policy, *others).losses):
        gradient = torch.autograd.grad(loss, policy, retain_graph=True)[0]
        assert gradient.nonzero().flatten().tolist() == [row]


@BOTH
def test_halves_of_a_window_make_another_loss(loss):
    """Why the batch given must be the whole window."""
    rows = columns([(-1, -6, -3, -3), (-2, -3, -1, -9)])
    halves = torch.cat([loss(*(c[i : i + 1] for c in rows), beta=1.0).losses for i in (0, 1)])
    assert not torch.isclose(halves.mean(), loss(*rows, beta=1.0).losses.mean())
