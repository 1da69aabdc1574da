"""How our code answers the public faults of advantages."""

from collections.abc import Callable
from typing import Any

import torch
from torch.testing import assert_close

from lit_align.losses import group_mean

Case = dict[str, Any]


def groups_are_rows_and_not_texts(case: Case) -> None:
    """The same prompt twice is two groups, in whatever order the completions come back."""
    given, expected = case["input"], case["expected"]
    rewards = torch.tensor(given["rewards"]).double()
    ids = torch.tensor([row["uid"] for row in given["rows"]]).unsqueeze(-1).expand_as(rewards)
    assert len({row["prompt"] for row in given["rows"]}) < len(ids), "no text stands there twice"
    right = torch.tensor(expected["advantages"]).double()
    for order in (torch.arange(rewards.numel()), torch.arange(rewards.numel()).flip(0)):
        advantages = group_mean(rewards.flatten()[order], ids.flatten()[order])
        assert_close(advantages, right.flatten()[order], rtol=0, atol=case["tolerance"])
    by_text = group_mean(rewards.flatten(), torch.zeros(rewards.numel(), dtype=torch.int64))
    wrong = torch.tensor(expected["value_if_grouped_by_text"]).double()
    assert_close(by_text, wrong.flatten(), rtol=0, atol=case["tolerance"])


ADVANTAGES_CASES: dict[str, Callable[[Case], None]] = {"BC17": groups_are_rows_and_not_texts}
