"""Each correction by hand, by property, against its definition, and where it refuses."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import (
    CORRECTIONS,
    geometric_mask,
    icepop,
    mismatch,
    sequence_mask,
    tis,
    tis_geometric,
    tis_normalised,
    tis_sequence,
    tis_sequence_normalised,
)

WEIGHTS = [name for name in CORRECTIONS if name != "none"]
EVERY = pytest.mark.parametrize("name", WEIGHTS)
LOG_RATIO = st.floats(-60, 60)
ROWS = st.lists(
    st.lists(st.tuples(LOG_RATIO, st.booleans()), min_size=4, max_size=4), min_size=1, max_size=4
)


def log(*ratios):
    """One row of log-ratios."""
    return torch.tensor([ratios], dtype=torch.float64).log()


def given_ratios(*ratios):
    """Old and sampler's log-probs of one row of which every token has the ratio given; the mask."""
    sampler = torch.full((1, len(ratios)), -3.0, dtype=torch.float64)
    return sampler + log(*ratios), sampler, torch.ones_like(sampler, dtype=torch.bool)


def of_rows(rows):
    log_ratio, mask = (torch.tensor([[pair[i] for pair in row] for row in rows]) for i in (0, 1))
    sampler = torch.full(mask.shape, -1.0, dtype=torch.float64)
    return sampler + log_ratio, sampler, mask


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


# By hand


def test_tis_by_hand():
    assert_close(tis(*given_ratios(0.25, 1, 1.9, 2.5)), row(0.25, 1, 1.9, 2))
    bounded = tis(*given_ratios(0.25, 1, 1.9, 2.5), tis_cap=1.5, tis_floor=0.5)
    assert_close(bounded, row(0.5, 1, 1.5, 1.5))


def test_tis_sequence_by_hand():
    # 0.5 * 3 = 1.5; the masked token's 8 does not count.
    old, sampler, mask = given_ratios(0.5, 8, 3)
    mask[0, 1] = False
    assert_close(tis_sequence(old, sampler, mask), row(1.5, 1, 1.5))
    assert_close(tis_sequence(old, sampler, mask, tis_cap=1.25), row(1.25, 1, 1.25))
    assert_close(tis_sequence(*given_ratios(0.5, 0.5), tis_floor=0.3), row(0.3, 0.3))


def test_icepop_by_hand():
    assert_close(icepop(*given_ratios(0.4, 0.6, 4, 6)), row(0, 0.6, 4, 0))
    bounded = icepop(*given_ratios(0.4, 0.6, 4, 6), icepop_lower=0.3, icepop_upper=3)
    assert_close(bounded, row(0.4, 0.6, 0, 0))


def test_tis_geometric_by_hand():
    # sqrt(0.5 * 3) = 1.22; the masked token's 8 does not count.
    old, sampler, mask = given_ratios(0.5, 8, 3)
    mask[0, 1] = False
    mean = math.sqrt(1.5)
    assert_close(tis_geometric(old, sampler, mask), row(mean, 1, mean))
    assert_close(tis_geometric(old, sampler, mask, tis_cap=1.1), row(1.1, 1, 1.1))
    assert_close(tis_geometric(sampler, old, mask, tis_floor=0.9), row(0.9, 1, 0.9))


def test_sequence_mask_by_hand():
    old, sampler, mask = given_ratios(0.5, 8, 3)
    mask[0, 1] = False
    assert_close(sequence_mask(old, sampler, mask), row(1.5, 1, 1.5))
    assert_close(sequence_mask(old, sampler, mask, sequence_upper=1.4), row(0, 1, 0))
    assert_close(sequence_mask(sampler, old, mask, sequence_lower=0.7), row(0, 1, 0))


def test_normalised_weights_by_hand():
    # Of tokens 0.5, 2 (capped) and 1.5: mean 4 / 3. Of completions 2 and 1.5: mean 1.75.
    old = torch.cat([given_ratios(0.5, 4)[0], given_ratios(1.5, 9)[0]])
    sampler, mask = torch.full((2, 2), -3.0).double(), torch.tensor([[1, 1], [1, 0]]).bool()
    tokens = tis_normalised(old, sampler, mask)
    assert_close(tokens, torch.tensor([[0.5, 2], [1.5, 4 / 3]]).double() * 0.75)
    whole = tis_sequence_normalised(old, sampler, mask)
    assert_close(whole, torch.tensor([[2, 2], [1.5, 1.75]]).double() / 1.75)


def test_geometric_mask_by_hand():
    # sqrt(0.5 * 3) = 1.22; the masked token's 8 does not count.
    old, sampler, mask = given_ratios(0.5, 8, 3)
    mask[0, 1] = False
    assert_close(geometric_mask(old, sampler, mask, mask_upper=1.25), row(1, 1, 1))
    assert_close(geometric_mask(old, sampler, mask, mask_upper=1.2), row(0, 1, 0))
    assert_close(geometric_mask(sampler, old, mask, mask_lower=0.8), row(1, 1, 1))
    assert_close(geometric_mask(sampler, old, mask, mask_lower=0.85), row(0, 1, 0))


def test_mismatch_by_hand():
    # ratio 2: k1 = -log 2, k3 = 2 - 1 - log 2.
    found = mismatch(*given_ratios(2, 1))
    assert_close(found.difference, row(math.log(2), 0))
    assert_close(found.ratio, row(2, 1))
    assert_close(found.k1, row(-math.log(2), 0))
    assert_close(found.k3, row(1 - math.log(2), 0))


def test_no_correction_reads_nothing():
    assert CORRECTIONS["none"].tensors == ()
    assert CORRECTIONS["none"]({"old_logprobs": row(0)}, None) is None


# Properties


@EVERY
def test_where_the_sampler_is_the_trainer_every_weight_is_1(name):
    logprobs = torch.tensor([[-0.1, -7.0, -1e4], [-1.0, -2.0, -3.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    weights = CORRECTIONS[name].fn(logprobs, logprobs, mask)
    assert (weights == 1).all()


@EVERY
@given(ROWS)
def test_weights_are_numbers_and_exactly_1_outside_the_mask(name, rows):
    old, sampler, mask = of_rows(rows)
    weights = CORRECTIONS[name].fn(old, sampler, mask)
    assert weights.shape == mask.shape
    assert weights.isfinite().all()
    assert (weights >= 0).all()
    assert (weights[~mask] == 1).all()


@EVERY
@given(ROWS)
def test_what_stands_outside_the_mask_does_not_matter(name, rows):
    old, sampler, mask = of_rows(rows)
    weights = CORRECTIONS[name].fn(old, sampler, mask)
    rubbish = old.where(mask, math.nan), sampler.where(mask, -math.inf), mask
    assert torch.equal(CORRECTIONS[name].fn(*rubbish), weights)
    assert not torch.cat(mismatch(*rubbish)).isnan().any()


@given(ROWS)
def test_a_completion_has_one_weight(rows):
    old, sampler, mask = of_rows(rows)
    for weigh in (tis_sequence, tis_geometric, sequence_mask, geometric_mask):
        for weights, trained in zip(weigh(old, sampler, mask), mask, strict=True):
            assert len(set(weights[trained].tolist())) <= 1


@given(ROWS, st.floats(1, 10), st.floats(0, 0.9))
def test_icepop_keeps_a_ratio_or_drops_it(rows, width, lower):
    old, sampler, mask = of_rows(rows)
    weights = icepop(old, sampler, mask, icepop_lower=lower, icepop_upper=1 + width)
    kept = weights != 0
    assert (weights[kept] >= lower).all()
    assert (weights[kept] <= 1 + width).all()
    log_ratio = (old - sampler)[kept & mask].clamp(-10, 10)
    assert_close(weights[kept & mask], log_ratio.exp())


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=2, max_size=6))
def test_uncapped_weights_turn_the_samplers_mean_into_the_trainers(weights):
    sampler, trainer = (
        (column / column.sum())
        for column in torch.tensor(weights, dtype=torch.float64).T.unsqueeze(1)
    )
    mask = torch.ones_like(sampler, dtype=torch.bool)
    values = torch.arange(sampler.shape[1], dtype=torch.float64)
    corrected = (sampler * tis(trainer.log(), sampler.log(), mask, tis_cap=1e6) * values).sum()
    assert_close(corrected, (trainer * values).sum())


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=2, max_size=6))
def test_both_estimates_have_the_divergence_for_their_mean(weights):
    sampler, trainer = (
        (column / column.sum())
        for column in torch.tensor(weights, dtype=torch.float64).T.unsqueeze(1)
    )
    found = mismatch(trainer.log(), sampler.log(), torch.ones_like(sampler, dtype=torch.bool))
    divergence = torch.nn.functional.kl_div(trainer.log(), sampler, reduction="sum")
    assert_close((sampler * found.k1).sum(), divergence)
    assert_close((sampler * found.k3).sum(), divergence)
    assert (found.k3 >= 0).all()


# Edges


def test_the_log_ratio_of_a_token_is_bounded():
    old, sampler, mask = given_ratios(1, 1, 1)
    old += row(-50, 1e4, 12)
    weights = tis(old, sampler, mask, tis_cap=1e6)
    assert_close(weights, row(math.exp(-10), math.exp(10), math.exp(10)))


def test_the_product_of_a_completion_is_not():
    # 3 * 15 - 44 = 1 nat: bounded one by one, they would make exp(-34).
    old, sampler, mask = given_ratios(1, 1, 1, 1)
    old += row(15, 15, 15, -44)
    assert_close(tis_sequence(old, sampler, mask, tis_cap=5), row(*[math.e] * 4))
    assert_close(tis_sequence(old + 300, sampler, mask), row(2, 2, 2, 2))
    assert_close(tis_sequence(old - 300, sampler, mask), row(0, 0, 0, 0))


def test_a_row_without_tokens_is_left_alone():
    old, sampler = torch.full((1, 3), -40.0), torch.zeros(1, 3)
    mask = torch.zeros(1, 3, dtype=torch.bool)
    for name in WEIGHTS:
        assert (CORRECTIONS[name].fn(old, sampler, mask) == 1).all()


@EVERY
def test_half_precision_is_computed_in_float32(name):
    old, sampler = torch.tensor([[-1.0]]).bfloat16(), torch.tensor([[-1.0078125]]).bfloat16()
    mask = torch.ones(1, 1, dtype=torch.bool)
    weights = CORRECTIONS[name].fn(old, sampler, mask)
    assert weights.dtype == torch.float32
    assert_close(weights, CORRECTIONS[name].fn(old.float(), sampler.float(), mask))
    assert CORRECTIONS[name].fn(old.double(), sampler.double(), mask).dtype == torch.float64


@EVERY
def test_weights_are_constants(name):
    old, sampler, mask = given_ratios(0.9, 1.1)
    assert not CORRECTIONS[name].fn(old.requires_grad_(), sampler, mask).requires_grad
    assert not any(part.requires_grad for part in mismatch(old, sampler, mask))


# Refusals


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["old_logprobs", "sampler_logprobs"])
@pytest.mark.parametrize("name", [*WEIGHTS, "mismatch"])
def test_log_probs_of_trained_tokens_must_be_finite(name, which, wrong):
    given = dict.fromkeys(("old_logprobs", "sampler_logprobs"), torch.zeros(2, 3))
    given[which] = torch.tensor([[0, 0, 0], [0, wrong, wrong]])
    function = mismatch if name == "mismatch" else CORRECTIONS[name].fn
    with pytest.raises(ValueError, match=rf"{which} is .* at \[1, 1\].*at 2 places"):
        function(**given, mask=torch.ones(2, 3, dtype=torch.bool))


@EVERY
def test_shapes_that_do_not_fit_are_refused(name):
    with pytest.raises(ValueError, match=r"sampler_logprobs \(1, 3\)"):
        CORRECTIONS[name].fn(torch.zeros(2, 3), torch.zeros(1, 3), torch.ones(2, 3).bool())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("tis", {"tis_cap": 0.5}),
        ("tis", {"tis_floor": 1.5}),
        ("tis", {"tis_floor": -0.1}),
        ("tis_sequence", {"tis_cap": 0}),
        ("icepop", {"icepop_lower": 1.2}),
        ("icepop", {"icepop_upper": 0.9}),
        ("geometric_mask", {"mask_lower": 1}),
        ("geometric_mask", {"mask_upper": 1}),
        ("sequence_mask", {"sequence_lower": 1}),
        ("sequence_mask", {"sequence_upper": 1}),
        ("tis_geometric", {"tis_cap": 0.9}),
    ],
)
def test_bounds_must_have_1_between_them(name, wrong):
    with pytest.raises(UserError, match=f"{name}.*{next(iter(wrong))}"):
        CORRECTIONS[name].settings(wrong)


def test_options_of_different_corrections_have_different_names_unless_they_mean_the_same():
    def options(name):
        return set(CORRECTIONS[name].hyperparameters)

    assert options("tis") == options("tis_sequence") == {"tis_cap", "tis_floor"}
    assert not options("tis") & options("icepop")
    assert not options("geometric_mask") & (options("tis") | options("icepop"))
