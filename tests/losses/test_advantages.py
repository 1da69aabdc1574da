"""Each advantage by hand, by property, against Python's own statistics, and where it refuses."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import (
    ADVANTAGES,
    batch_std,
    group_mean,
    group_mean_std,
    leave_one_out,
    leave_one_out_normalised,
)

NAN = math.nan
REWARD = st.floats(-100, 100, allow_subnormal=False)
SCORED = st.lists(st.tuples(REWARD, st.integers(0, 3)), min_size=1, max_size=12)
ANY = st.lists(st.tuples(REWARD | st.just(NAN), st.integers(0, 3)), min_size=1, max_size=12)
# Those that compare a completion with the mean of its group, and so sum to 0 in each.
CENTRED = [
    "batch_std",
    "group_mean",
    "group_mean_std",
    "leave_one_out",
    "leave_one_out_normalised",
]
EVERY = pytest.mark.parametrize("name", CENTRED)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def columns(rows):
    rewards, groups = zip(*rows, strict=True)
    return numbers(*rewards), torch.tensor(groups)


def exactly(actual, expected):
    assert_close(actual, expected, rtol=0, atol=0)


# By hand


def test_group_mean_by_hand():
    # Means 0.5 and 1, the groups interleaved.
    rewards, groups = columns([(1, 7), (3, 2), (0, 7), (0, 2), (0, 2)])
    assert_close(group_mean(rewards, groups), numbers(0.5, 2, -0.5, -1, -1))


def test_group_mean_std_by_hand():
    # Deviations of +-2 from 3: variance 4 * 4 / 3 with ddof 1, 4 with ddof 0.
    rewards, groups = columns([(1, 0), (5, 0), (1, 0), (5, 0)])
    signs = numbers(-1, 1, -1, 1)
    estimated = group_mean_std(rewards, groups, std_eps=0.5)
    assert_close(estimated, signs * 2 / (math.sqrt(16 / 3) + 0.5))
    assert_close(group_mean_std(rewards, groups, ddof=0, std_eps=0.5), signs * 2 / 2.5)


def test_group_mean_std_is_trls_by_default():
    # Two of four right: 0.5 / (sqrt(1/3) + 1e-4).
    rewards, groups = columns([(1, 0), (0, 0), (0, 0), (1, 0)])
    one = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert_close(group_mean_std(rewards, groups), numbers(one, -one, -one, one))


def test_batch_std_by_hand():
    # Means 1 and 4 by group; over the batch 2.5, and squares 6.25 + 0.25 + 0.25 + 6.25 = 13.
    rewards, groups = columns([(0, 0), (2, 0), (3, 1), (5, 1)])
    assert_close(
        batch_std(rewards, groups, std_eps=0.1),
        numbers(-1, 1, -1, 1) / (math.sqrt(13 / 3) + 0.1),
    )
    assert_close(
        batch_std(rewards, groups, ddof=0, std_eps=0.1),
        numbers(-1, 1, -1, 1) / (math.sqrt(13 / 4) + 0.1),
    )


def test_leave_one_out_by_hand():
    # 1 - (0 + 2) / 2, 0 - (1 + 2) / 2, 2 - (1 + 0) / 2; and a pair.
    rewards, groups = columns([(1, 0), (5, 9), (0, 0), (2, 0), (1, 9)])
    assert_close(leave_one_out(rewards, groups), numbers(0, 4, -1.5, 1.5, -4))


def test_the_unscored_are_in_no_mean_and_in_no_deviation():
    # Of the first group 1, 0, 1 count: mean 2/3, variance 1/3.
    rewards, groups = columns([(1, 0), (NAN, 0), (0, 0), (1, 0), (NAN, 1), (4, 1), (2, 1)])
    third, scale = 1 / 3, math.sqrt(1 / 3) + 1e-4
    assert_close(group_mean(rewards, groups)[:4], numbers(third, 0, -2 * third, third))
    assert_close(group_mean_std(rewards, groups)[:4], numbers(third, 0, -2 * third, third) / scale)
    assert_close(leave_one_out(rewards, groups)[:4], numbers(0.5, 0, -1, 0.5))
    # Over the batch 1, 0, 1, 4, 2: mean 1.6, squares 0.36 + 2.56 + 0.36 + 5.76 + 0.16 = 9.2.
    assert_close(
        batch_std(rewards, groups),
        numbers(third, 0, -2 * third, third, 0, 1, -1) / (math.sqrt(9.2 / 4) + 1e-4),
    )


# Properties of all of them


@EVERY
@given(ANY)
def test_an_unscored_row_gets_0_and_changes_nothing(name, rows):
    rewards, groups = columns(rows)
    advantages = ADVANTAGES[name].fn(rewards, groups)
    scored = ~rewards.isnan()
    assert (advantages[~scored] == 0).all()
    assert_close(advantages[scored], ADVANTAGES[name].fn(rewards[scored], groups[scored]))


@EVERY
@given(st.data(), ANY)
def test_the_order_of_the_rows_changes_no_bit(name, data, rows):
    rewards, groups = columns(rows)
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    advantages = ADVANTAGES[name].fn(rewards, groups)
    exactly(ADVANTAGES[name].fn(rewards[order], groups[order]), advantages[order])


@EVERY
@given(SCORED)
def test_a_group_is_known_by_its_number_alone(name, rows):
    rewards, groups = columns(rows)
    renamed = torch.tensor([40, -3, 2**40, 0])[groups]
    assert_close(ADVANTAGES[name].fn(rewards, renamed), ADVANTAGES[name].fn(rewards, groups))


@EVERY
@given(REWARD, st.integers(1, 9), st.integers(0, 2))
def test_where_a_group_agrees_nothing_is_left_of_rounding(name, reward, agreeing, unscored):
    rows = [(reward, 0)] * agreeing + [(NAN, 0)] * unscored + [(1, 1), (0, 1)]
    advantages = ADVANTAGES[name].fn(*columns(rows))
    assert (advantages[:-2] == 0).all()
    assert (advantages[-2:] != 0).all()


@EVERY
@given(SCORED)
def test_the_advantages_of_a_group_sum_to_0(name, rows):
    rewards, groups = columns(rows)
    advantages = ADVANTAGES[name].fn(rewards, groups)
    sums = torch.zeros(4, dtype=torch.float64).index_add(0, groups, advantages)
    assert (sums.abs() <= 1e-12 * (1 + advantages.abs().sum())).all()


@EVERY
@given(SCORED, st.floats(-1000, 1000))
def test_a_bonus_for_everybody_changes_nothing(name, rows, bonus):
    rewards, groups = columns(rows)
    shifted = ADVANTAGES[name].fn(rewards + bonus, groups)
    assert_close(shifted, ADVANTAGES[name].fn(rewards, groups), rtol=1e-6, atol=1e-7)


@EVERY
@given(SCORED, st.floats(0.01, 100))
def test_the_unit_of_rewards_is_kept_or_cancels(name, rows, unit):
    rewards, groups = columns(rows)
    before, scaled = (
        {"std_eps": eps} if "std_eps" in ADVANTAGES[name].hyperparameters else {}
        for eps in (1e-4, 1e-4 * unit)
    )
    factor = 1 if before else unit
    assert_close(
        ADVANTAGES[name].fn(rewards * unit, groups, **scaled),
        ADVANTAGES[name].fn(rewards, groups, **before) * factor,
        rtol=1e-6,
        atol=1e-7,
    )


@EVERY
@pytest.mark.parametrize("rows", [0, 1, 2, 5])
def test_every_advantage_runs_by_name(name, rows):
    rewards, groups = torch.arange(float(rows)), torch.zeros(rows, dtype=torch.int64)
    settings = ADVANTAGES[name].settings({})
    advantages = ADVANTAGES[name].fn(rewards, groups, **settings)
    assert advantages.shape == (rows,)
    assert advantages.isfinite().all()
    assert rows < 2 or advantages[0] < 0 < advantages[-1]


@EVERY
def test_a_completion_alone_in_its_group_gets_0(name):
    # The last group has one scored completion among three.
    rows = [(5, 0), (0, 1), (1, 1), (3, 2), (NAN, 2), (NAN, 2)]
    advantages = ADVANTAGES[name].fn(*columns(rows))
    assert (advantages == 0).tolist() == [True, False, False, True, True, True]


@EVERY
def test_a_batch_in_which_nothing_is_scored_gets_0(name):
    exactly(ADVANTAGES[name].fn(numbers(NAN, NAN, NAN), torch.tensor([0, 0, 1])), numbers(0, 0, 0))


@EVERY
def test_a_group_in_which_nothing_is_scored_spoils_no_other(name):
    rewards, groups = columns([(NAN, 0), (NAN, 0), (1, 1), (0, 1)])
    alone = ADVANTAGES[name].fn(rewards[2:], groups[2:])
    exactly(ADVANTAGES[name].fn(rewards, groups), torch.cat([numbers(0, 0), alone]))


# Against other sources


@given(SCORED, st.sampled_from([0, 1]))
def test_the_deviation_of_a_group_is_pythons(rows, ddof):
    rewards, groups = columns(rows)
    deviation = statistics.stdev if ddof else statistics.pstdev
    expected = []
    for reward, group in rows:
        peers = [other for other, number in rows if number == group]
        spread = deviation(peers) if len(peers) > 1 else 0
        expected.append((reward - statistics.mean(peers)) / (spread + 0.01))
    actual = group_mean_std(rewards, groups, ddof=ddof, std_eps=0.01)
    assert_close(actual, numbers(*expected))


@given(SCORED)
def test_batch_std_is_the_centred_reward_over_pythons_deviation_of_all(rows):
    rewards, groups = columns(rows)
    spread = statistics.stdev(reward for reward, _ in rows) if len(rows) > 1 else 0
    expected = group_mean(rewards, groups) / (spread + 0.01)
    assert_close(batch_std(rewards, groups, std_eps=0.01), expected)


@given(SCORED)
def test_leave_one_out_leaves_out_the_completion_itself(rows):
    expected = []
    for row, (reward, group) in enumerate(rows):
        others = [other for n, (other, number) in enumerate(rows) if number == group and n != row]
        expected.append(reward - statistics.mean(others) if others else 0.0)
    assert_close(leave_one_out(*columns(rows)), numbers(*expected))


# Dtypes


@EVERY
@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_advantages_are_float32_or_what_is_better(name, given, returned):
    rewards, groups = torch.tensor([1, 0, 3]).to(given), torch.tensor([0, 0, 0])
    assert ADVANTAGES[name].fn(rewards, groups).dtype == returned


def test_squares_do_not_vanish_in_half_the_precision():
    # (1e-25)^2 is 0 in float32.
    rewards, groups = torch.tensor([1e-25, 0.0, 1e-25, 0.0]), torch.zeros(4, dtype=torch.int64)
    scaled = group_mean_std(rewards, groups, ddof=0, std_eps=1e-30)
    assert_close(scaled, torch.tensor([1.0, -1.0, 1.0, -1.0]), rtol=1e-4, atol=0)


def test_advantages_are_constants():
    rewards = numbers(1, 0).requires_grad_()
    assert not group_mean_std(rewards, torch.tensor([0, 0])).requires_grad


# Refusals


@EVERY
def test_an_infinite_reward_is_refused_with_its_row(name):
    with pytest.raises(UserError, match=r"completion 1 is -inf"):
        ADVANTAGES[name].fn(numbers(1, -math.inf), torch.tensor([0, 0]))


@EVERY
def test_rewards_and_groups_that_do_not_fit_are_refused(name):
    with pytest.raises(ValueError, match=r"rewards \(2,\), groups \(3,\)"):
        ADVANTAGES[name].fn(numbers(1, 0), torch.tensor([0, 0, 0]))
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        ADVANTAGES[name].fn(numbers(1, 0)[None], torch.tensor([[0, 0]]))
    with pytest.raises(ValueError, match="integers"):
        ADVANTAGES[name].fn(numbers(1, 0), numbers(0, 0))


def test_leave_one_out_normalised_by_hand():
    # Leave-one-out of pairs: +-2 and +-1; of mean 0, squares 4 + 4 + 1 + 1 = 10 over 4 - 1.
    rewards, groups = columns([(0, 0), (2, 0), (4, 1), (5, 1)])
    scale = math.sqrt(10 / 3) + 0.1
    found = leave_one_out_normalised(rewards, groups, std_eps=0.1)
    assert_close(found, numbers(-2, 2, -1, 1) / scale)


@pytest.mark.parametrize(
    "wrong", [{"ddof": 2}, {"ddof": 0.5}, {"ddof": True}, {"std_eps": 0}, {"std_eps": -1e-4}]
)
def test_a_deviation_that_means_nothing_is_refused(wrong):
    for name in ("group_mean_std", "batch_std"):
        with pytest.raises(UserError, match=next(iter(wrong))):
            ADVANTAGES[name].settings(wrong)
