"""How a rollout is cut into optimizer steps, and those into micro-batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lit_align.errors import UserError
from lit_align.logprobs import Item, Ways, balance, fill
from lit_align.rollout.rows import Sample

PADDED = Ways(packs=False, shares=False, chooses=False)
# The samples of an optimizer step: per micro-batch, per rank.
Window = list[list[list[Sample]]]


@dataclass(frozen=True)
class RolloutPlan:
    """The sizes of a run; any combination of them works.

    Args:
        prompts_per_step: prompts of an optimizer step, over all ranks.
        num_generations: completions of each prompt.
        batch_size: completions of a micro-batch on each rank, at most.
        steps_per_rollout: optimizer steps made of one rollout; from the second on, the policy has
            moved since it wrote the completions.
        num_iterations: how often each completion is trained on.
        replicas: ranks that share the work.
        accumulate: micro-batches of an optimizer step; None: as many as are needed.
        ways: how a batch goes through the model.
        most_tokens: that a micro-batch runs at most, whatever the completions turn out to be, in
            place of `batch_size`; None: no limit.
        longest: tokens of the longest prompt and of the longest completion there may be.
    """

    prompts_per_step: int
    num_generations: int
    batch_size: int
    steps_per_rollout: int = 1
    num_iterations: int = 1
    replicas: int = 1
    accumulate: int | None = None
    ways: Ways = PADDED
    most_tokens: int | None = None
    longest: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for name in (
            "prompts_per_step",
            "num_generations",
            "batch_size",
            "steps_per_rollout",
            "num_iterations",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"data.{name} must be a whole number of at least 1, not {value!r}")
        if self.accumulate is not None and self.accumulate < self._least:
            limit = "batch_size" if self.most_tokens is None else "max_tokens_per_batch"
            raise UserError(
                f"a step of {self.prompts_per_step} prompts x {self.num_generations} completions "
                f"needs {self._least} micro-batches of {self._limit} on {self.replicas} "
                f"rank(s), and trainer.accumulate_grad_batches is {self.accumulate}: leave it at "
                f"1 (then it is set as needed), raise it, or raise data.{limit}"
            )

    def on(self, replicas: int, accumulate: int | None) -> "RolloutPlan":
        """The same sizes on so many ranks, with so many micro-batches a step.

        Raises:
            UserError: if that is too few micro-batches.
        """
        return replace(self, replicas=replicas, accumulate=accumulate)

    @cached_property
    def _least(self) -> int:
        """Micro-batches that a step needs at least."""
        rows = self.prompts_per_step * self.num_generations
        if self.most_tokens is None:
            return math.ceil(rows / (self.batch_size * self.replicas))
        prompt, completion = self.longest
        items = [Item(row // self.num_generations, prompt, (completion,)) for row in range(rows)]
        return math.ceil(len(fill(items, self.ways, self.most_tokens)) / self.replicas)

    @property
    def _limit(self) -> str:
        """Of a micro-batch, in words."""
        return f"{self.batch_size}" if self.most_tokens is None else f"{self.most_tokens} tokens"

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an optimizer step, on each rank."""
        return self.accumulate or self._least

    @property
    def steps(self) -> int:
        """Optimizer steps between two rollouts."""
        return self.steps_per_rollout * self.num_iterations

    @property
    def batches(self) -> int:
        """Micro-batches between two rollouts, on each rank."""
        return self.steps * self.micro_batches

    @property
    def prompts(self) -> int:
        """Prompts of a rollout."""
        return self.prompts_per_step * self.steps_per_rollout

    def describe(self) -> str:
        """How a step is put together, in a line."""
        return (
            f"{self.prompts_per_step} prompts x {self.num_generations} completions a step, in "
            f"{self.micro_batches} micro-batches x {self.replicas} ranks of at most "
            f"{self._limit}; a rollout of {self.prompts} prompts makes {self.steps} "
            f"of them (steps_per_rollout {self.steps_per_rollout} x num_iterations "
            f"{self.num_iterations})"
        )


def steps_of(
    groups: Sequence[Sequence[Sample]], plan: RolloutPlan, seed: int
) -> list[list[Sample]]:
    """The optimizer steps of one pass over a rollout: whole groups, dealt out evenly.

    Args:
        groups: of the rollout.
        plan: says how many steps.
        seed: of which group goes where; without effect on a single step.
    """
    order = list(range(len(groups)))
    if plan.steps_per_rollout > 1:
        order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    return [
        [
            sample
            for position in order[step :: plan.steps_per_rollout]
            for sample in groups[position]
        ]
        for step in range(plan.steps_per_rollout)
    ]


def cut(samples: Sequence[Sample], plan: RolloutPlan) -> Window:
    """The micro-batches of a step, and of each the share of every rank; shares may be empty.

    All run about as many tokens. Samples of like length are put together, which saves padding, or
    those of a group where the model runs their prompt once; which of a group's samples end up
    where does not matter to the gradient. The longest come first: if memory does not suffice,
    that shows at once.
    """
    ordered = _ordered(samples, keeps_groups=plan.ways.shares)
    items = [Item(one.group, len(one.prompt_ids), (len(one.completion_ids),)) for one in ordered]
    most_rows = plan.batch_size if plan.most_tokens is None else None
    count = plan.micro_batches * plan.replicas
    shares = [
        [ordered[place] for place in places]
        for places in balance(items, plan.ways, count, most_rows)
    ]
    shares += [[] for _ in range(count - len(shares))]
    return [shares[n : n + plan.replicas] for n in range(0, count, plan.replicas)]


def _ordered(samples: Sequence[Sample], *, keeps_groups: bool) -> list[Sample]:
    """The longest first, or the groups that have the longest."""
    longest: dict[int, int] = {}
    for one in samples:
        longest[one.group] = max(one.length, longest.get(one.group, 0))

    def place(one: Sample) -> tuple[int, ...]:
        return (-longest[one.group], one.group, -one.length) if keeps_groups else (-one.length,)

    return sorted(samples, key=place)
