"""How our code answers the public faults of rewards."""

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from lit_align.errors import UserError
from lit_align.losses import group_mean_std
from lit_align.rewards import RewardSuite, gym_score, math_match, numeric_match

Case = dict[str, Any]


def score(suite: RewardSuite, completions: list[str], **columns: list[Any]) -> list[float | None]:
    return suite.score(
        [""] * len(completions), completions, [[1]] * len(completions), columns
    ).total


def advantages(case: Case, rewards: list[float | None]) -> torch.Tensor:
    given = case["input"]
    values = torch.tensor([float("nan") if r is None else r for r in rewards]).double()
    return group_mean_std(
        values,
        torch.zeros(len(values), dtype=torch.int64),
        ddof=given["ddof"],
        std_eps=given["eps"],
    )


def what_does_not_apply_shifts_nobody(case: Case) -> None:
    given, expected = case["input"], case["expected"]

    def same(rewards: list[float | None], right: list[float]) -> None:
        right = torch.tensor(right).double()
        assert_close(advantages(case, rewards), right, rtol=0, atol=case["tolerance"])

    for name, right in (("group", "advantages"), ("all_none_group", "all_none_group")):
        suite = RewardSuite({"mine": lambda completions, mark: mark})
        same(score(suite, ["x"] * len(given[name]), mark=given[name]), expected[right])
    same([mark or 0 for mark in given["group"]], expected["value_of_the_bug"])

    def f(completions: list[str], k: int) -> list[float]:
        return given["wrong_length"]["returned"] * k

    partial = functools.partial(f, k=1)
    count = given["wrong_length"]["completions"]
    with pytest.raises(UserError, match=rf"\(f\).*\({count} expected, 1 returned\)"):
        score(RewardSuite({"mine": partial}), ["x"] * count)
    assert score(RewardSuite({"mine": partial}), ["x"]) == given["wrong_length"]["returned"]


def a_stuck_checker_is_stopped_from_any_thread(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    right = given["correct"]

    def checker(completions: list[str], answer: list[str]) -> list[float | None]:
        if "stuck" in completions:
            time.sleep(given["stuck_checker_seconds"])
        return math_match(completions, answer=answer)

    def check(completion: str) -> tuple[float | None, float]:
        start = time.monotonic()
        [found] = score(suite, [completion], answer=[right["gold"]])
        return found, time.monotonic() - start

    # The first calls import sympy, which takes its time on a busy machine.
    suite = RewardSuite({"checker": checker}, on_error="zero", workers=given["pool_size"])
    with ThreadPoolExecutor(1) as thread:
        calls = [check, lambda completion: thread.submit(check, completion).result()]
        assert [call(right["completion"])[0] for call in calls] == expected["score"]
    suite.timeout = given["limit_seconds"]
    with ThreadPoolExecutor(given["stuck_calls"]) as threads:
        stuck = [threads.submit(check, "stuck") for _ in range(given["pool_size"])]
        assert all(future.result()[0] == 0.0 for future in stuck)
        assert all(future.result()[1] < 3 for future in stuck)
    for _ in range(given["stuck_calls"] - given["pool_size"]):
        found, seconds = check("stuck")
        assert found == 0.0
        assert seconds < 3
    suite.timeout = 30
    assert check(right["completion"])[0] == 1.0
    found = suite.score([""], ["stuck too"], [[1]], {"answer": [right["gold"]]})
    assert found.failures == {"checker": 0}


def answers_are_never_evaluated(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    answers, gold = given["answers"], given["gold"]
    suite = RewardSuite({"numeric": numeric_match})
    assert score(suite, ["1"], answer=["1"]) == [1.0]
    start = time.monotonic()
    found = score(suite, answers, answer=gold)
    assert time.monotonic() - start < expected["time_limit_seconds"]
    right = torch.tensor(expected["scores"])
    assert_close(torch.tensor(found), right, rtol=0, atol=case["tolerance"])
    # One sample cannot change the score of the next.
    assert score(suite, answers[::-1], answer=gold[::-1]) == found[::-1]
    # Nor does anything run through the libraries behind the other two.
    boxed = [rf"\boxed{{{answer}}}" for answer in answers]
    suite = RewardSuite({"math": functools.partial(math_match, seconds=1)}, on_error="zero")
    assert score(suite, boxed, answer=gold) == expected["scores"]
    for task in ("countdown", "n_queens"):
        item = {"answer": "1", "metadata": {"source_dataset": task, "valid_answers": ["1"]}}
        item["metadata"] |= {"numbers": [1], "target": 1}
        suite = RewardSuite({"gym": functools.partial(gym_score, tag=None)}, timeout=10)
        assert score(suite, ["1"], entry=[item]) == [1.0]
        found = score(suite, answers, entry=[item] * len(answers))
        assert max(found) < 0.1
        assert score(suite, ["1"], entry=[item]) == [1.0]


REWARDS_CASES: dict[str, Callable[[Case], None]] = {
    "BC23": what_does_not_apply_shifts_nobody,
    "BC24": a_stuck_checker_is_stopped_from_any_thread,
    "BC25": answers_are_never_evaluated,
}
