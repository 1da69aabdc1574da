"""What validation says, by hand."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_samples import rewarded, sample

from lit_align.errors import UserError
from lit_align.modules.evaluation import Evaluation, powers_of_two

NAN = math.nan


def of(*rewards, right_from=1.0):
    """The metrics of prompts whose completions have these rewards."""
    evaluation = Evaluation(len(rewards[0]), right_from)
    for row, of_row in enumerate(rewards):
        evaluation.add(rewarded(row, of_row))
    evaluation.gather(lambda mine: [mine])
    return evaluation.metrics()


def test_pass_at_k_of_three_prompts_with_four_completions():
    """Right: 1, 4 and 0 of 4.

    pass@2 = 1 - C(n - c, 2) / C(4, 2): 1 - 3/6, 1, 0. pass^2 = C(c, 2) / C(4, 2): 0, 1, 0.
    """
    found = of([0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0])
    per_prompt = {
        "pass@1": (0.25, 1, 0),
        "pass@2": (0.5, 1, 0),
        "pass@4": (1, 1, 0),
        "pass^2": (0, 1, 0),
        "pass^4": (0, 1, 0),
        "reward": (0.25, 1, 0),
    }
    for name, values in per_prompt.items():
        mean = sum(values) / 3
        std = math.sqrt(sum((value - mean) ** 2 for value in values) / 2)
        assert found[name] == pytest.approx(mean), name
        assert found[f"{name}/stderr"] == pytest.approx(std / math.sqrt(3)), name
    assert {name for name in found if name.startswith("pass") and "/" not in name} == {
        *per_prompt
    } - {"reward"}


def test_one_prompt_has_no_standard_error():
    found = of([1, 0])
    assert found["pass@1"] == 0.5
    assert not [name for name in found if name.endswith("/stderr")]


def test_what_is_right_is_for_the_user_to_say():
    assert of([0.5], [0.4], right_from=0.5)["pass@1"] == 0.5


def test_what_was_not_scored_is_not_right_and_in_no_mean_reward():
    found = of([NAN, 1.0], [NAN, NAN], [0.0, 0.5])
    assert found["pass@1"] == pytest.approx((0.5 + 0 + 0) / 3)
    # The second prompt has no reward at all: two remain, 1.0 and 0.25.
    assert found["reward"] == pytest.approx(0.625)
    assert found["reward/stderr"] == pytest.approx(math.sqrt(2 * 0.375**2) / math.sqrt(2))


def test_where_nothing_was_scored_the_reward_is_no_number():
    found = of([NAN], [NAN])
    assert math.isnan(found["reward"])
    assert "reward/stderr" not in found
    assert found["pass@1"] == 0


def test_lengths_and_truncation_are_means_over_prompts():
    evaluation = Evaluation(2, 1.0)
    made = [(0, 2, "stop"), (0, 4, "length"), (1, 6, "length"), (1, 8, "length")]
    evaluation.add(
        [
            sample(row, n % 2, completion=[0] * length, finish_reason=reason)
            for n, (row, length, reason) in enumerate(made)
        ]
    )
    found = evaluation.metrics()
    assert found["completions/mean_length"] == 5
    assert found["completions/mean_length/stderr"] == pytest.approx(2)  # of 3 and 7
    assert found["completions/clipped_ratio"] == 0.75


def test_the_ranks_together_say_what_one_would():
    rewards = [[0.0, 1.0], [1.0, 1.0], [0.5, 0.0]]
    ranks = [[*rewarded(1, rewards[1])], [*rewarded(2, rewards[2]), *rewarded(0, rewards[0])]]
    evaluation = Evaluation(2, 1.0)
    evaluation.add(ranks[0])
    evaluation.gather(lambda mine: [mine, ranks[1]])
    assert [(one.row, one.number) for one in evaluation.samples] == [
        (row, n) for row in range(3) for n in range(2)
    ]
    assert evaluation.metrics() == of(*rewards)


def test_a_new_validation_starts_from_nothing():
    evaluation = Evaluation(1, 1.0)
    evaluation.add(rewarded(0, [1.0]))
    evaluation.reset()
    evaluation.add(rewarded(5, [0.0]))
    assert evaluation.metrics()["pass@1"] == 0


@given(st.integers(1, 300))
def test_k_doubles_as_far_as_there_are_completions(most):
    ks = powers_of_two(most)
    assert ks[0] == 1
    assert all(b == 2 * a for a, b in pairwise(ks))
    assert ks[-1] <= most < 2 * ks[-1]


@pytest.mark.parametrize("generations", [0, -1, 1.5, True, None])
def test_there_is_a_whole_number_of_completions(generations):
    with pytest.raises(UserError, match="val_generations must be a whole number >= 1"):
        Evaluation(generations, 1.0)
