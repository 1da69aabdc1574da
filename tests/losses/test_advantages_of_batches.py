"""Advantages that compare otherwise than by a group's mean: by hand, by property, and refusals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import (
    ADVANTAGES,
    GRPOConfig,
    best_of_group,
    best_of_group_std,
    gdpo,
    gpg,
    group_mean,
    group_mean_std,
    length_weighted,
    mean_relative,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
)
from lit_align.losses.grpo import advantages

NAN = math.nan
NAMES = sorted(
    {"length_weighted", "best_of_group", "best_of_group_std", "mean_relative", "remax"}
    | {"reinforce_pp", "reinforce_pp_baseline", "gpg", "gdpo"}
)
EVERY = pytest.mark.parametrize("name", NAMES)
# Those for which a group that agrees is at 0.
BY_GROUP = [n for n in NAMES if n not in {"remax", "reinforce_pp", "reinforce_pp_baseline"}]
REWARD = st.integers(-20, 20).map(lambda number: number / 4)
ROWS = st.lists(
    st.tuples(REWARD | st.just(NAN), st.integers(0, 2), st.integers(0, 9), REWARD),
    min_size=1,
    max_size=10,
)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def found(name, rows):
    """The advantage of rows of reward, group, length and greedy reward."""
    rewards, groups, lengths, greedy = zip(*rows, strict=True)
    rewards = numbers(*rewards)
    others = {
        "lengths": torch.tensor(lengths),
        "greedy_rewards": numbers(*greedy),
        "rewards_by_name": torch.stack([rewards, numbers(*greedy).where(~rewards.isnan(), NAN)], 1),
        "reward_weights": numbers(1.0, 0.5),
    }
    return advantages(GRPOConfig(advantage=name), rewards, torch.tensor(groups), **others)


# By hand


def test_length_weighted_by_hand():
    # Baselines (1 * 1 + 3 * 0) / 4 and, of a group of one token each, a plain mean.
    rewards, groups = numbers(1, 0, 4, 2), torch.tensor([0, 0, 5, 5])
    advantage = length_weighted(rewards, groups, torch.tensor([1, 3, 1, 1]))
    assert_close(advantage, numbers(0.75, -0.25, 1, -1))


def test_the_best_of_a_group_by_hand():
    rewards, groups = numbers(1, 4, 2, 3, 3, NAN, 5), torch.tensor([0, 0, 0, 1, 1, 1, 2])
    assert_close(best_of_group(rewards, groups), numbers(0, 2, 0, 0, 0, 0, 0))
    # Of 1, 4, 2 the variance is (16/9 + 25/9 + 1/9) / 2 = 7/3.
    scaled = best_of_group_std(rewards, groups, std_eps=0.1)
    assert_close(scaled, numbers(0, 2 / (math.sqrt(7 / 3) + 0.1), 0, 0, 0, 0, 0))
    whole = best_of_group_std(rewards, groups, ddof=0, std_eps=0.1)
    assert_close(whole[1].item(), 2 / (math.sqrt(14 / 9) + 0.1))


def test_mean_relative_by_hand():
    # Means 0.25, 0 and -1: one in four right counts four times.
    rewards = numbers(1, 0, 0, 0, 0, 0, -2, 0)
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    assert_close(mean_relative(rewards, groups), numbers(3, -1, -1, -1, 0, 0, 0, 0))


def test_remax_by_hand():
    assert_close(remax(numbers(1, 0, NAN), numbers(0.5, 0.5, 0.5)), numbers(0.5, -0.5, 0))


def test_reinforce_pp_by_hand():
    # Tokens 1, 1, 1, 0: mean 0.75, variance 0.1875, or 0.25 with ddof 1.
    rewards, lengths = numbers(1, 0), torch.tensor([3, 1])
    deviation = math.sqrt(0.1875)
    assert_close(reinforce_pp(rewards, lengths), numbers(0.25, -0.75) / deviation)
    assert_close(reinforce_pp(rewards, lengths, ddof=1), numbers(0.25, -0.75) / 0.5)


def test_reinforce_pp_baseline_by_hand():
    # Centred 1, -1, 2, -2 with tokens 3, 1, 1, 1: mean 2/6, mean of squares (3 + 1 + 4 + 4) / 6.
    rewards, groups = numbers(2, 0, 4, 0), torch.tensor([0, 0, 1, 1])
    deviation = math.sqrt(2 - 1 / 9)
    advantage = reinforce_pp_baseline(rewards, groups, torch.tensor([3, 1, 1, 1]))
    assert_close(advantage, (numbers(1, -1, 2, -2) - 1 / 3) / deviation)


def test_gpg_by_hand():
    # Of five scored completions three agree: 5 / 2.
    rewards, groups = numbers(1, 0, 0, 0, 0, NAN), torch.tensor([0, 0, 1, 1, 1, 1])
    assert_close(gpg(rewards, groups), numbers(1.25, -1.25, 0, 0, 0, 0))


def test_gdpo_by_hand():
    # Each of two rewards is right once in two: +-0.5 / sqrt(0.5), of either, whatever its scale.
    by_name = torch.tensor([[1, 0], [0, 100], [1, 100], [0, 0]], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1])
    small, large = (scale / 2 / (scale / math.sqrt(2) + 1e-9) for scale in (1.0, 100.0))
    raw = numbers(small - 2 * large, 2 * large - small, small + 2 * large, -small - 2 * large)
    advantage = gdpo(by_name, numbers(1, 2), groups, std_eps=1e-9)
    assert_close(advantage, raw / (raw.std() + 1e-9))


def test_gdpo_counts_what_applies():
    by_name = torch.tensor([[1, NAN], [0, 5], [NAN, NAN], [0.5, 1]], dtype=torch.float64)
    groups = torch.zeros(4, dtype=torch.int64)
    advantage = gdpo(by_name, numbers(1, 1), groups)
    assert advantage[2] == 0
    columns = [group_mean_std(column, groups) for column in by_name.unbind(1)]
    raw = (columns[0] + columns[1])[[0, 1, 3]]
    assert_close(advantage[[0, 1, 3]], raw / (raw.std() + 1e-4))


# Properties


@EVERY
@given(ROWS)
def test_unscored_rows_get_0_and_change_nothing(name, rows):
    scored = [row for row in rows if not math.isnan(row[0])]
    advantage = found(name, rows)
    left = [not math.isnan(row[0]) for row in rows]
    assert advantage.isfinite().all()
    assert not advantage[~torch.tensor(left)].any()
    if scored:
        assert_close(advantage[torch.tensor(left)], found(name, scored))


@EVERY
@given(st.data(), ROWS)
def test_the_order_of_the_rows_means_nothing(name, data, rows):
    order = data.draw(st.permutations(range(len(rows))))
    assert_close(found(name, [rows[n] for n in order]), found(name, rows)[torch.tensor(order)])


@pytest.mark.parametrize("name", BY_GROUP)
@given(REWARD, st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_a_group_that_agrees_is_at_0(name, reward, lengths):
    rows = [(reward, 0, length, 1.0) for length in lengths] + [(1, 1, 2, 3.0), (0, 1, 5, 0.0)]
    assert not found(name, rows)[:-2].any()


@given(ROWS)
def test_of_completions_of_one_length_the_baseline_is_the_mean(rows):
    rewards, groups = numbers(*[row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    lengths = torch.full((len(rows),), 7)
    assert_close(length_weighted(rewards, groups, lengths), group_mean(rewards, groups))


@given(ROWS)
def test_over_tokens_the_mean_is_0_and_the_variance_1(rows):
    rows = [(row[0], row[1], row[2] + 1, 0.0) for row in rows if not math.isnan(row[0])]
    for name in ("reinforce_pp", "reinforce_pp_baseline"):
        if not rows or not found(name, rows).any():
            continue
        tokens = found(name, rows).repeat_interleave(torch.tensor([row[2] for row in rows]))
        assert abs(tokens.mean()) < 1e-6
        assert_close(tokens.square().mean().item(), 1.0, rtol=1e-5, atol=1e-5)


@EVERY
def test_dtypes_are_float32_or_better(name):
    rows = [(1, 0, 2, 0.5), (0, 0, 3, 0.5)]
    assert found(name, rows).dtype == torch.float64
    half = torch.tensor([1.0, 0.0]).bfloat16()
    others = {
        "lengths": torch.tensor([2, 3]),
        "greedy_rewards": half,
        "rewards_by_name": half.unsqueeze(1),
        "reward_weights": torch.ones(1),
    }
    groups = torch.tensor([0, 0])
    assert advantages(GRPOConfig(advantage=name), half, groups, **others).dtype == torch.float32


@EVERY
def test_an_empty_batch_is_an_empty_answer(name):
    empty = torch.zeros(0)
    others = {
        "lengths": empty.long(),
        "greedy_rewards": empty,
        "rewards_by_name": torch.zeros(0, 2),
        "reward_weights": torch.ones(2),
    }
    config = GRPOConfig(advantage=name)
    assert advantages(config, empty, empty.long(), **others).shape == (0,)


# Refusals


def test_what_is_needed_is_asked_for_by_name():
    rewards, groups = numbers(1, 0), torch.tensor([0, 0])
    for name, said in (
        ("opo", "advantage 'length_weighted' needs lengths"),
        ("gdpo", "advantage 'gdpo' needs rewards_by_name, reward_weights"),
        ("remax", "advantage 'remax' needs greedy_rewards"),
    ):
        with pytest.raises(ValueError, match=said):
            advantages(GRPOConfig(advantage=name), rewards, groups)


def test_shapes_that_do_not_fit_are_refused():
    rewards, groups = numbers(1, 0), torch.tensor([0, 0])
    for advantage in (reinforce_pp, remax):
        with pytest.raises(ValueError, match=r"\(3,\)"):
            advantage(rewards, torch.zeros(3))
    with pytest.raises(ValueError, match=r"lengths \(3,\)"):
        length_weighted(rewards, groups, torch.zeros(3))
    with pytest.raises(UserError, match=r"\(2, 3\) and \(2,\)"):
        gdpo(torch.zeros(2, 3), numbers(1, 1), groups)
    with pytest.raises(UserError, match=r"completion 1 is inf"):
        gdpo(torch.tensor([[0.0], [math.inf]]), numbers(1), groups)


def test_papers_names_are_understood():
    assert ADVANTAGES["opo"] is ADVANTAGES["length_weighted"]
    assert ADVANTAGES["maxrl"] is ADVANTAGES["mean_relative"]
    assert ADVANTAGES["grpo_passk"] is ADVANTAGES["best_of_group_std"]
