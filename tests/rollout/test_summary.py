"""The numbers about a rollout, by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_samples import rewarded, sample

from lit_align.rollout import rollout_metrics

NAN = math.nan
REWARD = st.sampled_from([0.0, 0.3, 1.0, 0.1 + 0.2, NAN])


def of(*groups, right_from=1.0):
    return rollout_metrics([rewarded(n, group) for n, group in enumerate(groups)], right_from)


def test_rewards_are_averaged_over_completions_and_their_spread_over_groups():
    # Deviations with ddof 1: of [0, 1] sqrt(1/2), of [0.5, 0.5] 0, of [1, NaN] 0.
    found = of([0.0, 1.0], [0.5, 0.5], [1.0, NAN])
    assert found["reward"] == pytest.approx((0 + 1 + 0.5 + 0.5 + 1) / 5)
    assert found["reward_std"] == pytest.approx(math.sqrt(0.5) / 3)
    assert found["rewards/unscored"] == pytest.approx(1 / 6)


def test_each_reward_function_has_its_own_numbers():
    group = rewarded(0, [1.0, 2.0, NAN])
    for one, marks in zip(group, [(1.0, None), (0.0, 2.0), (None, None)], strict=True):
        one.rewards = dict(zip(("right", "format"), marks, strict=True))
    found = rollout_metrics([group], 1.0)
    assert found["rewards/right/mean"] == 0.5
    assert found["rewards/right/std"] == pytest.approx(math.sqrt(0.5))
    assert found["rewards/format/mean"] == 2.0
    assert found["rewards/format/std"] == 0.0


def test_what_nothing_was_scored_of_is_0_and_said_to_be_unscored():
    found = of([NAN, NAN], [NAN])
    assert (found["reward"], found["reward_std"], found["rewards/unscored"]) == (0.0, 0.0, 1.0)
    assert found["groups/unscored"] == 1.0
    assert found["frac_reward_zero_std"] == 1.0


@pytest.mark.parametrize(
    ("rewards", "kind"),
    [
        ([1.0, 1.0], "all_right"),
        ([1.5, 1.5], "all_right"),
        ([1.0], "all_right"),
        # What was not scored says nothing against the others.
        ([1.0, NAN], "all_right"),
        ([0.0, 0.0], "all_wrong"),
        ([0.5, NAN, 0.5], "all_wrong"),
        ([0.1 + 0.2, 0.3], "all_wrong"),
        ([0.0, 1.0], "mixed"),
        ([0.0, 0.5, NAN], "mixed"),
        ([NAN, NAN], "unscored"),
    ],
)
def test_a_group_is_one_of_four_kinds(rewards, kind):
    found = of(rewards)
    assert {
        name: value for name, value in found.items() if name.startswith("groups/") and value
    } == {f"groups/{kind}": 1.0}
    assert found["frac_reward_zero_std"] == float(kind != "mixed")


@given(st.lists(st.lists(REWARD, min_size=1, max_size=4), min_size=1, max_size=9))
def test_the_shares_of_the_kinds_add_up_to_1(groups):
    shares = [value for name, value in of(*groups).items() if name.startswith("groups/")]
    assert len(shares) == 4
    assert math.fsum(shares) == pytest.approx(1, abs=1e-12)


def test_what_is_right_is_for_the_user_to_say():
    assert of([0.5, 0.5], right_from=0.5)["groups/all_right"] == 1.0


def test_lengths_are_told_of_all_and_of_those_that_ended():
    lengths = [(2, "stop"), (4, "stop"), (9, "length")]
    group = [
        sample(0, n, completion=[n] * length, finish_reason=reason)
        for n, (length, reason) in enumerate(lengths)
    ]
    found = rollout_metrics([group], 1.0)
    assert {name: value for name, value in found.items() if "length" in name} == {
        "completions/mean_length": 5.0,
        "completions/min_length": 2.0,
        "completions/max_length": 9.0,
        "completions/mean_terminated_length": 3.0,
    }
    assert found["completions/clipped_ratio"] == pytest.approx(1 / 3)


def test_where_none_ended_there_is_no_length_of_those():
    found = rollout_metrics([[sample(0, finish_reason="length")]], 1.0)
    assert found["completions/clipped_ratio"] == 1.0
    assert "completions/mean_terminated_length" not in found


def test_a_completion_repeats_one_of_its_own_group_only():
    # Of four two repeat the first; of two none; the mean over the groups is (2 / 4 + 0) / 2.
    said = [[[1], [2], [1], [1]], [[1], [2]]]
    groups = [
        [sample(g, n, completion=ids) for n, ids in enumerate(group)]
        for g, group in enumerate(said)
    ]
    assert rollout_metrics(groups, 1.0)["completions/duplicates"] == 0.25
