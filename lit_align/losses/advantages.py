"""Advantages: how much better a completion was than the others of its prompt.

Every function takes what its signature names, one row per completion, and returns one advantage per
completion:

* `rewards`, (N,): the weighted sum of its rewards;
* `rewards_by_name`, (N, K), and `reward_weights`, (K,): the K rewards themselves;
* `groups`, (N,): the number of its group. Which completions belong together is said by that number
  alone: the order of the rows means nothing, and changes nothing;
* `lengths`, (N,): its tokens;
* `greedy_rewards`, (N,): the reward of the prompt's greedy completion.

Here is what compares a completion with its group by means and deviations; `advantages_group` has
other comparisons, `advantages_batch` what is normalised over the whole batch.

What holds for all of them:

* A reward of NaN stands for a completion that nothing scored. It is left out of every mean and
  standard deviation, and its advantage is exactly 0.
* Where all rewards of a group agree, its advantages are exactly 0; so is that of the only scored
  completion of a group, which has nothing to be compared with.
* It is computed in float64 and returned as float32, or as float64 if the rewards are.
* The batch is what is passed: the rewards of all ranks, for the numbers of one process to be those
  of many.
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from lit_align.losses.reward_table import RewardTable, deviation
from lit_align.losses.variants import Range, Variants

ADVANTAGES = Variants(
    aliases={
        "grpo_passk": "best_of_group_std",
        "maxrl": "mean_relative",
        "opo": "length_weighted",
        "reinforce_plus_plus": "reinforce_pp",
        "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    },
    noun="advantage",
)


@dataclass(frozen=True)
class _ZeroOrOne:
    """The two corrections of a standard deviation that anyone takes."""

    def admits(self, value: object) -> bool:
        return not isinstance(value, bool) and value in (0, 1)

    def __str__(self) -> str:
        return "0 or 1"


Ddof = Annotated[int, _ZeroOrOne()]
StdEps = Annotated[float, Range(above=0)]


@ADVANTAGES.register("group_mean")
def group_mean(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards centred by group.

        advantage = reward - mean of the group

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.

    Returns:
        (N,), reward units.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Elsewhere:
        open-instruct's default, where a right answer is worth 10.

    Source:
        Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783, section 3.2.
    """
    table = RewardTable.of(rewards, groups)
    return table.returned(table.centred)


@ADVANTAGES.register("group_mean_std")
@ADVANTAGES.register("group_mean_std_verl", std_eps=1e-6)
def group_mean_std(
    rewards: Tensor, groups: Tensor, *, ddof: Ddof = 1, std_eps: StdEps = 1e-4
) -> Tensor:
    """Rewards centred and scaled by group.

        advantage = (reward - mean of the group) / (standard deviation of the group + std_eps)

    The paper says "std" and no more. With 8 completions, ddof 0 makes advantages 7 % larger than
    ddof 1. `group_mean_std_verl` has verl's std_eps.

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.
        ddof: what is subtracted from the number of rewards when squares are averaged: 0 for the
            deviation of the group, 1 for an estimate of the policy's.
        std_eps: added to the standard deviation, reward units, > 0. Differences between rewards
            that are smaller than this count for little.

    Returns:
        (N,), dimensionless.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Elsewhere:
        TRL and torchtune take ddof 1 and std_eps 1e-4, verl 1 and 1e-6, the authors of Dr. GRPO 1
        and 1e-8, OpenRLHF 1 and 1e-9, open-instruct 0 and 1e-8.

    Source:
        Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300, section 4.1.2; ddof and std_eps: TRL.
    """
    table = RewardTable.of(rewards, groups)
    return table.returned(table.centred / (deviation(table.rewards, ddof) + std_eps))


@ADVANTAGES.register("batch_std")
def batch_std(rewards: Tensor, groups: Tensor, *, ddof: Ddof = 1, std_eps: StdEps = 1e-4) -> Tensor:
    """Rewards centred by group and scaled by what the whole batch spreads.

        advantage = (reward - mean of the group) / (standard deviation of the batch + std_eps)

    A group in which nearly all completions agree is not blown up by its own small deviation. The
    deviation is that of the rewards themselves, around their mean over the batch, as in TRL.

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.
        ddof: what is subtracted from the number of rewards when squares are averaged, 0 or 1.
        std_eps: added to the standard deviation, reward units, > 0.

    Returns:
        (N,), dimensionless.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Source:
        Liu et al. 2025 (Lite PPO), arXiv:2508.08221; ddof and std_eps: TRL.
    """
    table = RewardTable.of(rewards, groups)
    batch = table.rewards.flatten().sort().values.unsqueeze(0)
    return table.returned(table.centred / (deviation(batch, ddof) + std_eps))


@ADVANTAGES.register("leave_one_out_normalised")
def leave_one_out_normalised(
    rewards: Tensor, groups: Tensor, *, ddof: Ddof = 1, std_eps: StdEps = 1e-4
) -> Tensor:
    """`leave_one_out`, scaled by what these advantages spread over the whole batch.

        advantage = leave_one_out / (standard deviation of leave_one_out over the batch + std_eps)

    Their mean, which TRL subtracts besides, is 0: they sum to 0 in every group.

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.
        ddof: what is subtracted from the number of advantages when squares are averaged, 0 or 1.
        std_eps: added to the standard deviation, reward units, > 0.

    Returns:
        (N,), dimensionless.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Source:
        TRL, RLOO with normalize_advantages.
    """
    table = RewardTable.of(rewards, groups)
    others = (table.scored - 1).clamp(min=1)
    raw = table.centred * table.scored / others
    batch = raw.flatten().sort().values.unsqueeze(0)
    return table.returned(raw / (deviation(batch, ddof) + std_eps))


@ADVANTAGES.register("leave_one_out")
def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """Rewards less the mean of the others of the group.

        advantage_i = reward_i - mean of reward_j, j != i

    It is n / (n - 1) times what `group_mean` gives a group of n scored completions.

    Args:
        rewards: one per completion, (N,), reward units; NaN: unscored.
        groups: number of the group of each completion, (N,), integers.

    Returns:
        (N,), reward units.

    Raises:
        ValueError: if the shapes differ, groups are not integers, or a reward is infinite.

    Elsewhere:
        verl's loop keeps the raw reward of a completion that is alone in its group.

    Source:
        Ahmadian et al. 2024 (RLOO), arXiv:2402.14740; Kool et al. 2019, "Buy 4 REINFORCE
        samples, get a baseline for free".
    """
    table = RewardTable.of(rewards, groups)
    return table.returned(table.centred * table.scored / (table.scored - 1).clamp(min=1))
