"""Ratio levels: values by hand, what masks hide, and bounds."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import RATIOS
from lit_align.losses.ratio import sequence_ratio, sequence_token_ratio, token_ratio

LEVELS = [variant.fn for variant in RATIOS.values()]
LOGPROBS = st.lists(st.floats(-20, 0), min_size=3, max_size=3)


def row(*values, dtype=torch.float64):
    return torch.tensor([values], dtype=dtype)


def mask(*values):
    return torch.tensor([values]).bool()


def test_a_token_s_ratio_by_hand():
    ratio = token_ratio(row(-1.0, -2.0, -3.0), row(-1.5, -2.0, -1.0), mask(1, 1, 1))
    assert_close(ratio, row(math.exp(0.5), 1.0, math.exp(-2.0)))


def test_a_sequence_s_ratio_is_the_geometric_mean_by_hand():
    # Log-ratios 0.5, 0 and -2, the last of them masked: exp(0.5 / 2) for the whole row.
    ratio = sequence_ratio(row(-1.0, -2.0, -3.0), row(-1.5, -2.0, -1.0), mask(1, 1, 0))
    assert_close(ratio, row(*[math.exp(0.25)] * 3))


def test_of_sequence_token_the_value_is_the_sequence_s_and_the_gradient_the_token_s():
    new = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]]).double().requires_grad_()
    old = torch.tensor([[-1.5, -2.0, -1.0], [-2.0, -2.0, -1.0]]).double()
    trained = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    ratio = sequence_token_ratio(new, old, trained)
    assert_close(ratio, sequence_ratio(new, old, trained))
    # Each token's weight shows in its own gradient alone: ratio times weight.
    weights = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]).double()
    [gradient] = torch.autograd.grad((weights * ratio).sum(), new)
    assert_close(gradient, ratio.detach() * weights * trained)


@pytest.mark.parametrize("level", LEVELS)
@given(LOGPROBS)
def test_the_ratio_of_an_unmoved_policy_is_exactly_1(level, logprobs):
    new = row(*logprobs, dtype=torch.float32)
    assert (level(new, new, mask(1, 0, 1)) == 1).all()


@pytest.mark.parametrize("level", LEVELS)
@given(LOGPROBS, LOGPROBS, st.floats(-5, 5))
def test_only_the_difference_counts(level, new, old, shift):
    trained = mask(1, 1, 0)
    assert_close(
        level(row(*new) + shift, row(*old) + shift, trained), level(row(*new), row(*old), trained)
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_outside_the_mask_does_not_matter(level, garbage):
    new = row(-1.0, -2.0, garbage).requires_grad_()
    ratio = level(new, row(-1.5, garbage, -1.0), mask(1, 0, 0))
    clean = level(row(-1.0, -9.0, -9.0), row(-1.5, -9.0, -9.0), mask(1, 0, 0))
    assert_close(ratio, clean)
    [gradient] = torch.autograd.grad(ratio[0, 0], new)
    assert_close(gradient, row(math.exp(0.5), 0.0, 0.0))


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_without_tokens_has_ratio_1(level):
    assert (level(row(-1.0, -2.0), row(-3.0, -3.0), mask(0, 0)) == 1).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("drift", [90.0, 1e3, -90.0, -1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_however_far_the_policy_drifts_value_and_gradient_are_finite(level, drift, dtype):
    new = row(drift, drift, -1.0, dtype=dtype).requires_grad_()
    ratio = level(new, torch.zeros_like(new), mask(1, 1, 0))
    [gradient] = torch.autograd.grad(ratio.sum(), new)
    assert gradient.isfinite().all()
    limit = math.exp(20) if drift > 0 else 0.0
    assert_close(ratio[0, 0].item(), limit, rtol=1e-6, atol=1e-12)
    assert not gradient[0, :2].abs().max() > 1e-12


def test_the_bound_lies_at_a_log_ratio_of_20():
    new = row(19.0, 21.0).requires_grad_()
    ratio = token_ratio(new, row(0.0, 0.0), mask(1, 1))
    assert_close(ratio, row(math.exp(19), math.exp(20)))
    [gradient] = torch.autograd.grad(ratio.sum(), new)
    assert_close(gradient, row(math.exp(19), 0.0))


@pytest.mark.parametrize("level", LEVELS)
def test_the_old_policy_is_a_constant(level):
    old = row(-1.0, -2.0).requires_grad_()
    new = row(-1.5, -1.0).requires_grad_()
    assert torch.autograd.grad(level(new, old, mask(1, 1)).sum(), old, allow_unused=True) == (None,)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("given_as", "computed_in"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_half_precision_is_computed_in_float32(level, given_as, computed_in):
    new = row(-8.125, -2.25, dtype=given_as)
    ratio = level(new, row(-8.0, -2.0, dtype=given_as), mask(1, 1))
    assert ratio.dtype == computed_in
    assert_close(
        ratio.mean(), level(new.double(), row(-8.0, -2.0), mask(1, 1)).mean().to(computed_in)
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["new_logprobs", "old_logprobs"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_trained_token_without_a_finite_log_prob_is_named(level, name, value):
    tensors = {"new_logprobs": row(-1.0, -1.0), "old_logprobs": row(-1.0, -1.0)}
    tensors[name][0, 1] = value
    with pytest.raises(UserError, match=rf"{name} is {value} at \[0, 1\]"):
        level(**tensors, mask=mask(1, 1))


@pytest.mark.parametrize("level", LEVELS)
def test_ratios_refuse_to_broadcast_and_to_take_weights_for_a_mask(level):
    with pytest.raises(ValueError, match=r"old_logprobs \(1, 1\)"):
        level(row(-1.0, -1.0), row(-1.0), mask(1, 1))
    with pytest.raises(ValueError, match="must be bool"):
        level(row(-1.0, -1.0), row(-1.0, -1.0), mask(1, 1).float())


def test_a_sequence_s_product_by_hand():
    # Log-ratios 0.5, 0 and -2, the last of them masked: exp(0.5) for the whole row.
    new = row(-1.0, -2.0, -3.0).requires_grad_()
    ratio = RATIOS["sequence_product"].fn(new, row(-1.5, -2.0, -1.0), mask(1, 1, 0))
    assert_close(ratio, row(*[math.exp(0.5)] * 3))
    # Each of three places has the whole ratio, and both tokens move it as much.
    [gradient] = torch.autograd.grad(ratio.sum(), new)
    assert_close(gradient, row(3 * math.exp(0.5), 3 * math.exp(0.5), 0.0))
