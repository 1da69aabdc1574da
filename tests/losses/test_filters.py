"""Token filters: what they keep by hand, and what is a constant."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import FILTERS
from lit_align.losses.filters import (
    k2_bound,
    k3_bound,
    off_policy_sequence,
    ratio_bounds,
    top_entropy,
    total_variation,
)

OF_THE_SAMPLER = ["ratio_bounds", "k2_bound", "k3_bound", "total_variation"]
LEVELS = ["token", "sequence_sum", "sequence_mean", "sequence_max"]


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def mask(*values):
    return torch.tensor([values]).bool()


def of_ratios(*ratios):
    """Old and sampler's log-probs of a row of these ratios, and a mask of all."""
    sampler = torch.full((1, len(ratios)), -3.0, dtype=torch.float64)
    return sampler + row(*ratios).log(), sampler, torch.ones_like(sampler).bool()


def test_top_entropy_by_hand():
    # Of four trained tokens the quantile 0.5 is 2.5, and 0.8 is 3.4.
    entropy, trained = row(1.0, 3.0, 99.0, 2.0, 4.0), mask(1, 1, 0, 1, 1)
    kept = top_entropy(entropy, trained, entropy_share=0.5)
    assert kept.tolist() == [[False, True, True, False, True]]
    assert top_entropy(entropy, trained).tolist() == [[False, False, True, False, True]]
    assert top_entropy(entropy, trained, entropy_share=1.0).all()
    assert top_entropy(entropy, mask(0, 0, 0, 0, 0)).all()


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.floats(0.01, 1))
def test_top_entropy_is_the_quantile_of_torch(values, share):
    entropy = row(*values)
    kept = top_entropy(entropy, torch.ones_like(entropy).bool(), entropy_share=share)
    threshold = entropy.quantile(1 - share)
    clear = (entropy - threshold).abs() > 1e-9
    assert (kept == (entropy >= threshold))[clear].all()
    assert kept.any()


def test_off_policy_sequence_by_hand():
    # The first row fell by 1 nat a token and is bad; the second the same and good; the third fell
    # by 0.4 on average; of the fourth the masked token fell.
    new = torch.tensor([[-2.0, -2.0], [-2.0, -2.0], [-1.0, -1.8], [-1.0, -9.0]])
    old, gains = torch.full((4, 2), -1.0), torch.tensor([[-1.0], [1.0], [-1.0], [-1.0]])
    trained = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]]).bool()
    arguments = new, old, gains.expand(4, 2), trained
    assert off_policy_sequence(*arguments).tolist() == [[False] * 2] + [[True] * 2] * 3
    assert not off_policy_sequence(*arguments, off_policy_delta=0.3)[2].any()
    # The sampler's own log-probs go before the trainer's.
    assert off_policy_sequence(*arguments, new).all()


def test_total_variation_by_hand():
    # |0.5 - 1|, |1.5 - 1| and |2 - 1|: a mean of 2/3.
    arguments = of_ratios(0.5, 1.5, 2.0)
    gains = row(1.0, 1.0, -1.0)
    kept = total_variation(*arguments[:2], gains, arguments[2], tv_upper=0.6)
    # Only the second would go where it has gone too far already.
    assert kept.tolist() == [[True, False, True]]
    assert total_variation(*arguments[:2], gains, arguments[2], tv_upper=0.7).all()
    low = total_variation(*arguments[:2], gains, arguments[2], tv_upper=9.0, tv_lower=0.7)
    assert low.tolist() == [[True, False, True]]


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        ("token", [True, True, False]),
        ("sequence_sum", [False, False, False]),
        ("sequence_mean", [True, True, True]),
        ("sequence_max", [False, False, False]),
    ],
)
def test_ratio_bounds_by_hand(level, kept):
    # Product 3.6, geometric mean 1.53; only upwards, so that the lower bound does not matter.
    arguments = of_ratios(1.0, 1.2, 3.0)
    found = ratio_bounds(*arguments, bound_over=level, ratio_lower=0.9, ratio_upper=2.0)
    assert found.tolist() == [kept]


def test_one_token_below_is_as_bad_as_one_above():
    bounds = {"bound_over": "sequence_max", "ratio_lower": 0.5, "ratio_upper": 2.0}
    assert ratio_bounds(*of_ratios(0.6, 1.9, 1.0), **bounds).all()
    assert not ratio_bounds(*of_ratios(0.4, 1.9, 1.0), **bounds).any()
    assert not ratio_bounds(*of_ratios(0.6, 2.1, 1.0), **bounds).any()


def test_the_bounds_are_those_of_the_trainer_over_the_sampler():
    kept = ratio_bounds(*of_ratios(0.4, 0.7, 1.6, 2.1), ratio_lower=0.8, ratio_upper=2.0)
    assert kept.tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("level", LEVELS)
def test_the_divergences_by_hand(level):
    # Log-ratios 0.2, -0.4, 0: squares halved 0.02, 0.08, 0; k3 to a digit the same.
    arguments = of_ratios(math.exp(0.2), math.exp(-0.4), 1.0)
    sizes = {"token": None, "sequence_sum": 0.1, "sequence_mean": 0.1 / 3, "sequence_max": 0.08}
    if sizes[level] is None:
        kept = k2_bound(*arguments, bound_over=level, divergence_bound=0.05)
        assert kept.tolist() == [[True, False, True]]
        return
    for bound, is_kept in ((sizes[level] * 0.99, False), (sizes[level] * 1.01, True)):
        kept = k2_bound(*arguments, bound_over=level, divergence_bound=bound)
        assert kept.tolist() == [[is_kept] * 3]
    k3 = [math.exp(x) - 1 - x for x in (0.2, -0.4, 0.0)]
    size = {"sequence_sum": sum(k3), "sequence_mean": sum(k3) / 3, "sequence_max": max(k3)}[level]
    for bound, is_kept in ((size * 0.99, False), (size * 1.01, True)):
        assert k3_bound(*arguments, bound_over=level, divergence_bound=bound).all() == is_kept


@pytest.mark.parametrize("name", OF_THE_SAMPLER)
@given(st.lists(st.floats(-60, 60), min_size=3, max_size=3))
def test_what_stands_outside_the_mask_does_not_matter_and_is_kept(name, log_ratios):
    sampler, trained = row(-1.0, -1.0, -1.0), mask(1, 0, 1)
    old = sampler + row(*log_ratios)
    given = {"advantages": row(1.0, -1.0, 1.0), "mask": trained}
    options = {"tv_upper": 0.5} if name == "total_variation" else {}
    found = []
    for outside in (0.0, math.nan):
        tensors = {
            "old_logprobs": old.where(trained, outside),
            "sampler_logprobs": sampler.where(trained, -math.inf if outside else 0.0),
        }
        tensors = {n: t for n, t in {**tensors, **given}.items() if n in FILTERS[name].tensors}
        found.append(FILTERS[name].fn(**tensors, **options))
    assert torch.equal(*found)
    assert found[0].dtype == torch.bool
    assert found[0][~trained].all()


@pytest.mark.parametrize("name", OF_THE_SAMPLER)
@pytest.mark.parametrize("drift", [1e4, -1e4])
def test_drifts_of_ten_thousand_nats_are_left_out_and_no_trouble(name, drift):
    given = {
        "old_logprobs": torch.tensor([[-1.0]]),
        "sampler_logprobs": torch.tensor([[-1.0 - drift]]),
        "advantages": torch.tensor([[drift]]),
        "mask": mask(1),
    }
    options = {"tv_upper": 0.5} if name == "total_variation" else {}
    tensors = {n: t for n, t in given.items() if n in FILTERS[name].tensors}
    assert not FILTERS[name].fn(**tensors, **options).any()


def test_filters_are_constants():
    new = row(-2.0, -2.0).requires_grad_()
    kept = off_policy_sequence(new, row(-1.0, -1.0), row(-1.0, -1.0), mask(1, 1))
    assert not kept.requires_grad
    assert not top_entropy(row(1.0, 2.0).requires_grad_(), mask(1, 1)).requires_grad


def test_without_a_filter_nothing_is_read():
    assert FILTERS["none"].tensors == ()
    assert FILTERS["none"]({}, None) is None


def test_an_entropy_that_is_not_finite_is_named():
    with pytest.raises(UserError, match=r"entropy is nan at \[0, 1\]"):
        top_entropy(row(1.0, math.nan), mask(1, 1))
    assert_close(top_entropy(row(1.0, math.nan), mask(1, 0)), mask(1, 1))


@pytest.mark.parametrize("name", [name for name in FILTERS if name != "none"])
def test_shapes_that_do_not_fit_are_refused(name):
    tensors = {n: torch.zeros(2, 3) for n in FILTERS[name].tensors}
    tensors["mask"] = torch.ones(2, 4).bool()
    options = {"tv_upper": 0.5} if name == "total_variation" else {}
    with pytest.raises(ValueError, match=r"mask \(2, 4\)"):
        FILTERS[name].fn(**tensors, **options)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("top_entropy", {"entropy_share": 0.0}),
        ("off_policy_sequence", {"off_policy_delta": 0}),
        ("total_variation", {"tv_upper": 0.0}),
        ("ratio_bounds", {"ratio_lower": 1.1}),
        ("ratio_bounds", {"ratio_upper": 0.9}),
        ("ratio_bounds", {"bound_over": "sequence"}),
        ("k2_bound", {"divergence_bound": -1.0}),
    ],
)
def test_a_bound_that_means_nothing_is_refused(name, wrong):
    with pytest.raises(UserError, match=f"{name}.*{next(iter(wrong))}"):
        FILTERS[name].settings({"tv_upper": 0.5} | wrong if name == "total_variation" else wrong)
