"""What a rollout looked like, in numbers: most of what explains why a run learns or does not."""

import math
from collections import Counter
from collections.abc import Sequence

from lit_align.rollout.collect import is_informative
from lit_align.rollout.rows import Sample

KINDS = ("mixed", "all_right", "all_wrong", "unscored")


def rollout_metrics(groups: Sequence[Sequence[Sample]], right_from: float) -> dict[str, float]:
    """Numbers over all completions that were written, those filtered out later included.

    Names are TRL's where it has one. Of the groups, those that are `mixed` can teach something;
    the others are `all_right`, `all_wrong` or `unscored`. The four shares `groups/*` add up to 1.
    Completions without a reward are left out of everything that is said of rewards; what nothing
    is left for is 0.

    Args:
        groups: the completions, group by group; at least one.
        right_from: the reward from which a completion counts as right.
    """
    samples = [sample for group in groups for sample in group]
    return (
        _rewards(groups, samples)
        | _lengths(samples)
        | _signal(groups, right_from)
        | {"completions/duplicates": _mean([_duplicates(group) for group in groups])}
    )


def _rewards(groups: Sequence[Sequence[Sample]], samples: Sequence[Sample]) -> dict[str, float]:
    found = {
        "reward": _mean([s.reward for s in samples]),
        # TRL's reward_std is the mean over groups of the deviation within each.
        "reward_std": _mean([_std([s.reward for s in group]) for group in groups]),
        "rewards/unscored": _mean([float(math.isnan(s.reward)) for s in samples]),
    }
    for name in samples[0].rewards:
        values = [math.nan if (v := s.rewards[name]) is None else v for s in samples]
        found[f"rewards/{name}/mean"] = _mean(values)
        found[f"rewards/{name}/std"] = _std(values)
        found[f"rewards/{name}/failed"] = _mean([float(name in s.failed) for s in samples])
    return found


def _lengths(samples: Sequence[Sample]) -> dict[str, float]:
    lengths = [float(len(s.completion_ids)) for s in samples]
    ended = [float(len(s.completion_ids)) for s in samples if s.finish_reason == "stop"]
    found = {
        "completions/mean_length": _mean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": 1 - len(ended) / len(lengths),
    }
    return found | ({"completions/mean_terminated_length": _mean(ended)} if ended else {})


def _signal(groups: Sequence[Sequence[Sample]], right_from: float) -> dict[str, float]:
    """How many groups can teach anything; of the others, which are too easy and which too hard."""
    kinds = Counter(_kind(group, right_from) for group in groups)
    shares = {f"groups/{kind}": kinds[kind] / len(groups) for kind in KINDS}
    return {"frac_reward_zero_std": 1 - kinds["mixed"] / len(groups), **shares}


def _kind(group: Sequence[Sample], right_from: float) -> str:
    """Which of `KINDS` a group is."""
    if is_informative(group):
        return "mixed"
    scored = [sample.reward for sample in group if not math.isnan(sample.reward)]
    if not scored:
        return "unscored"
    return "all_right" if min(scored) >= right_from else "all_wrong"


def _duplicates(group: Sequence[Sample]) -> float:
    """Share of a group's completions that repeat an earlier one of it, token by token."""
    return 1 - len({tuple(s.completion_ids) for s in group}) / len(group)


def _mean(values: Sequence[float]) -> float:
    """Mean of the numbers among the values, 0 without any."""
    numbers = [value for value in values if not math.isnan(value)]
    return math.fsum(numbers) / len(numbers) if numbers else 0.0


def _std(values: Sequence[float]) -> float:
    """Standard deviation (ddof 1) of the numbers among the values, 0 for fewer than two."""
    numbers = [value for value in values if not math.isnan(value)]
    if len(numbers) < 2:  # noqa: PLR2004, one value has no spread
        return 0.0
    mean = _mean(numbers)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))
