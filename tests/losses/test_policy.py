"""Surrogates: values by hand, and where the clip takes a gradient."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import SURROGATES
from lit_align.losses.policy import (
    cispo_loss,
    clip_loss,
    dual_clip_loss,
    reinforce_loss,
    two_sided_loss,
)

CLIPPED = [clip_loss, dual_clip_loss, two_sided_loss]
# What some surrogates read besides.
REST = {"mask": torch.ones(1, 1).bool(), "draws": torch.zeros(1, 1)}
RATIOS = st.floats(0, 10)
ADVANTAGES = st.floats(-5, 5).filter(lambda advantage: abs(advantage) > 0.01)


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def test_clip_by_hand():
    # In range; above, wanted and not; below, wanted and not; with clip(r) in [0.8, 1.28].
    ratio = row(1.1, 2.0, 2.0, 0.5, 0.5)
    advantages = row(3.0, 3.0, -3.0, -3.0, 3.0)
    loss = clip_loss(ratio, advantages, clip_lower=0.2, clip_higher=0.28)
    assert_close(loss.unclipped, row(-3.3, -6.0, 6.0, 1.5, -1.5))
    assert_close(loss.clipped, row(-3.3, -3.84, 3.84, 2.4, -2.4))
    assert_close(loss.losses, row(-3.3, -3.84, 6.0, 2.4, -1.5))
    assert loss.clipped_low.tolist() == [[False, False, False, True, False]]
    assert loss.clipped_high.tolist() == [[False, True, False, False, False]]


def test_dual_clip_by_hand():
    # At 5 the charge for a bad token stops at 3 times its advantage, at 2 it does not yet.
    loss = dual_clip_loss(row(5.0, 2.0, 5.0), row(-1.0, -1.0, 1.0), dual_clip=3.0)
    assert_close(loss.losses, row(3.0, 2.0, -1.28))
    assert_close(loss.unclipped, row(5.0, 2.0, -5.0))
    assert loss.clipped_high.tolist() == [[True, False, True]]


def test_two_sided_by_hand():
    loss = two_sided_loss(row(5.0, 3.0, 5.0, 0.5), row(-1.0, -1.0, 1.0, -1.0), delta=4.0)
    assert_close(loss.unclipped, row(4.0, 3.0, -4.0, 0.5))
    assert_close(loss.losses, row(4.0, 3.0, -1.28, 0.8))
    assert loss.clipped_high.tolist() == [[True, False, True, False]]
    assert loss.clipped_low.tolist() == [[False, False, False, True]]


def test_cispo_by_hand():
    # Weights min(ratio, 1.28), times advantage and log-prob; nothing through the ratio.
    logprobs = row(-0.5, -0.7, -2.0).requires_grad_()
    ratio = row(3.0, 0.5, 3.0).requires_grad_()
    loss = cispo_loss(logprobs, ratio, row(2.0, -1.0, -1.0), clip_higher=0.28)
    assert_close(loss.losses, row(1.28, -0.35, -2.56))
    assert loss.unclipped is loss.clipped is loss.losses
    by_logprobs, by_ratio = torch.autograd.grad(
        loss.losses.sum(), (logprobs, ratio), allow_unused=True
    )
    assert_close(by_logprobs, row(-2.56, 0.5, 1.28))
    assert by_ratio is None
    assert loss.clipped_high.tolist() == [[True, False, True]]
    assert not loss.clipped_low.any()


def test_a_floor_under_cispo_s_weights_is_an_option():
    loss = cispo_loss(row(-1.0, -1.0), row(0.5, 0.9), row(1.0, 1.0), weight_floor=0.8)
    assert_close(loss.losses, row(0.8, 0.9))
    assert loss.clipped_low.tolist() == [[True, False]]


def test_reinforce_by_hand():
    logprobs = row(-0.5, -0.7).requires_grad_()
    loss = reinforce_loss(logprobs, row(2.0, -1.0))
    assert_close(loss.losses, row(1.0, -0.7))
    assert_close(torch.autograd.grad(loss.losses.sum(), logprobs)[0], row(-2.0, 1.0))
    assert not (loss.clipped_low | loss.clipped_high).any()


@pytest.mark.parametrize("surrogate", CLIPPED)
@given(RATIOS, ADVANTAGES)
def test_a_token_is_flagged_just_where_its_gradient_is_gone(surrogate, ratio, advantage):
    # At a bound itself both are right.
    assume(min(abs(ratio - bound) for bound in (0.8, 1.28, 3.0, 4.0)) > 1e-6)
    ratios = row(ratio).requires_grad_()
    loss = surrogate(ratios, row(advantage))
    [gradient] = torch.autograd.grad(loss.losses.sum(), ratios)
    flagged = (loss.clipped_low | loss.clipped_high).item()
    assert_close(gradient.item(), 0.0 if flagged else -advantage)
    assert not (loss.clipped_low & loss.clipped_high).any()


@given(RATIOS, ADVANTAGES)
def test_clip_is_the_larger_of_its_two_terms(ratio, advantage):
    loss = clip_loss(row(ratio), row(advantage))
    assert loss.losses.item() == max(loss.unclipped.item(), loss.clipped.item())


@given(st.floats(0.81, 1.27), ADVANTAGES)
def test_within_the_bounds_nothing_is_clipped(ratio, advantage):
    for surrogate in CLIPPED:
        assert_close(surrogate(row(ratio), row(advantage)).losses, row(-advantage * ratio))


@given(RATIOS, ADVANTAGES)
def test_the_outer_clips_lower_the_loss_of_bad_tokens_alone(ratio, advantage):
    plain = clip_loss(row(ratio), row(advantage)).losses
    for surrogate, bound in ((dual_clip_loss, 3.0), (two_sided_loss, 4.0)):
        found = surrogate(row(ratio), row(advantage)).losses
        assert_close(
            found,
            torch.minimum(plain, bound * row(advantage).abs()).where(row(advantage) < 0, plain),
        )


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("ratio", [0.0, 1.0, 1e4, math.inf])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_edges_of_the_ratio_give_finite_numbers(name, ratio, advantage):
    """An infinite ratio times no advantage is nothing, in value and in gradient."""
    tensors = {
        "new_logprobs": torch.tensor([[-1e4]], requires_grad=True),
        "ratio": torch.tensor([[ratio]], requires_grad=True),
        "advantages": torch.tensor([[advantage]]),
        "old_logprobs": torch.tensor([[-1e4]]),
        **REST,
    }
    loss = SURROGATES[name](tensors, None)
    assert all(part.isfinite().all() for part in loss)
    gradients = torch.autograd.grad(
        loss.losses.sum(), (tensors["new_logprobs"], tensors["ratio"]), allow_unused=True
    )
    assert all(g is None or g.isfinite().all() for g in gradients)
    if advantage == 0:
        assert not loss.losses.any()


def test_weights_multiply_every_term_and_clear_the_flags_of_tokens_that_weigh_nothing():
    loss = clip_loss(row(2.0, 2.0), row(3.0, 3.0))
    weighted = loss.weighted(row(0.5, 0.0))
    assert_close(weighted.unclipped, row(-3.0, 0.0))
    assert_close(weighted.clipped, row(-1.92, 0.0))
    assert_close(weighted.losses, row(-1.92, 0.0))
    assert weighted.clipped_high.tolist() == [[True, False]]
    assert loss.weighted(None) is loss


@pytest.mark.parametrize("name", SURROGATES)
def test_half_precision_is_computed_in_float32(name):
    given_as = {
        "new_logprobs": row(-2.125).bfloat16(),
        "ratio": row(1.0078125).bfloat16(),
        "advantages": row(0.3).bfloat16(),
        "old_logprobs": row(-2.5).bfloat16(),
    }
    found = SURROGATES[name]({**given_as, **REST}, None).losses
    doubles = {n: t.double() for n, t in given_as.items()}
    right = SURROGATES[name]({**doubles, **REST}, None).losses
    assert_close(found, right.float())


@pytest.mark.parametrize("name", SURROGATES)
def test_surrogates_refuse_to_broadcast(name):
    tensors = {name: torch.ones(2, 3) for name in SURROGATES[name].tensors}
    if "mask" in tensors:
        tensors["mask"] = tensors["mask"].bool()
    with pytest.raises(ValueError, match=r"advantages \(2, 1\)"):
        SURROGATES[name]({**tensors, "advantages": torch.ones(2, 1)}, None)


@pytest.mark.parametrize("delta", [1.1, 1.28])
def test_two_sided_says_why_delta_must_leave_room_for_the_clip(delta):
    with pytest.raises(UserError, match=r"above 1 \+ clip_higher = 1\.28"):
        two_sided_loss(row(1.0), row(1.0), clip_higher=0.28, delta=delta)
