"""From prompts to scored completions, on all ranks together."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lit_align.rewards import RewardSuite, Scores
from lit_align.rollout.engine import Engine, Request, Sampling, sample_seed
from lit_align.rollout.rows import Drawn, Rollout, Sample, grouped

# A prompt and the numbers of the completions that are wanted of it.
Task = tuple[Drawn, list[int]]


class Tokenizer(Protocol):
    """What turns token ids into the text that rewards judge."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class Completer:
    """Writes completions and has them judged.

    Args:
        engine: whose weights are those of `version`.
        rewards: judges the completions.
        tokenizer: of the policy.
        sampling: how the next token is chosen.
        run_seed: what every completion's own seed is derived from.
        version: of the weights.
    """

    engine: Engine
    rewards: RewardSuite
    tokenizer: Tokenizer
    sampling: Sampling
    run_seed: int
    version: int

    def write(self, tasks: Sequence[Task]) -> list[Sample]:
        """The completions, prompt by prompt in the order of their numbers."""
        requests = [self._request(drawn, numbers) for drawn, numbers in tasks]
        answers = self.engine.generate(requests, self.sampling)
        return [
            Sample(
                group=drawn.group,
                row=drawn.prompt.row,
                number=number,
                prompt_ids=drawn.prompt.ids,
                completion_ids=completion.ids,
                finish_reason=completion.finish_reason,
                sampler_logprobs=completion.logprobs,
                prompt=drawn.prompt.prompt,
                completion=self.tokenizer.decode(completion.ids, skip_special_tokens=True),
            )
            for (drawn, numbers), completions in zip(tasks, answers, strict=True)
            for number, completion in zip(numbers, completions, strict=True)
        ]

    @property
    def greedy(self) -> "Completer":
        """One that takes the likeliest token each time, and is the same otherwise."""
        likeliest = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        return replace(self, sampling=likeliest)

    def judge(self, samples: Sequence[Sample], drawn: Sequence[Drawn]) -> None:
        """Let every sample know its rewards; `drawn` holds the prompts that they answer."""
        columns = {one.group: one.prompt.columns for one in drawn}
        give_rewards(self.rewards, samples, [columns[sample.group] for sample in samples])

    def _request(self, drawn: Drawn, numbers: list[int]) -> Request:
        row, draw = drawn.prompt.row, drawn.draw
        seeds = [sample_seed(self.run_seed, row, draw, n, self.version) for n in numbers]
        return Request(drawn.prompt.ids, numbers, seeds)


def give_rewards(
    rewards: RewardSuite, samples: Sequence[Sample], columns: Sequence[Mapping[str, Any]]
) -> None:
    """Let every sample know its rewards, by name and in sum.

    Args:
        rewards: judge.
        samples: in any order.
        columns: of the data row that each sample answers.
    """
    if not samples:
        return
    scores: Scores = rewards.score(
        [sample.prompt for sample in samples],
        [as_reply(sample) for sample in samples],
        [sample.completion_ids for sample in samples],
        {name: [row[name] for row in columns] for name in columns[0]},
    )
    for position, (sample, total) in enumerate(zip(samples, scores.total, strict=True)):
        sample.reward = float("nan") if total is None else total
        sample.rewards = {name: values[position] for name, values in scores.by_name.items()}
        sample.failed = [name for name, failed in scores.failed.items() if failed[position]]


def as_reply(sample: Sample) -> Any:
    """The completion as rewards take it: a text after a text, a message in a conversation."""
    if isinstance(sample.prompt, str):
        return sample.completion
    return [{"role": "assistant", "content": sample.completion}]


def share(drawn: Sequence[Drawn], numbers: Sequence[int], rank: int, replicas: int) -> list[Task]:
    """What one rank writes: as many completions as any other, give or take one.

    A group may be divided between ranks. The shares of all ranks, one after the other, are the
    groups in their order.

    Args:
        drawn: prompts.
        numbers: of the completions of each.
        rank: of this process.
        replicas: ranks that share the work.
    """
    total = len(drawn) * len(numbers)
    first, last = (total * (rank + n) // replicas for n in (0, 1))
    tasks: dict[int, list[int]] = {}
    for place in range(first, last):
        group, position = divmod(place, len(numbers))
        tasks.setdefault(group, []).append(numbers[position])
    return [(drawn[group], mine) for group, mine in tasks.items()]


def collect(
    completer: Completer,
    gather: Callable[[list[Sample]], list[list[Sample]]],
    drawn: Sequence[Drawn],
    *,
    numbers: Sequence[int],
    rank: int,
    replicas: int,
) -> list[list[Sample]]:
    """Completions of all the prompts, judged, group by group; the same on every rank.

    Any rank may write any completion, but a group is judged as a whole: some rewards compare its
    completions with each other.

    Args:
        completer: writes and judges.
        gather: brings what each rank holds to all of them, in the order of the ranks.
        drawn: prompts.
        numbers: of the completions of each.
        rank: of this process.
        replicas: ranks that share the work.
    """
    written = gather(completer.write(share(drawn, numbers, rank, replicas)))
    groups = grouped([sample for samples in written for sample in samples])
    mine = [sample for group in groups[rank::replicas] for sample in group]
    completer.judge(mine, drawn)
    judged = [sample for samples in gather(mine) for sample in samples]
    return grouped(sorted(judged, key=lambda sample: (sample.group, sample.number)))


def compare_with_greedy(rollout: Rollout) -> None:
    """Let every sample know the reward of its prompt's greedy completion, if there is one.

    Args:
        rollout: its `metrics` gain how well the greedy completions did, and how long they are.
    """
    if not rollout.greedy:
        return
    rewards = {sample.group: sample.reward for sample in rollout.greedy}
    for sample in rollout.samples:
        sample.greedy_reward = rewards[sample.group]
    scored = [reward for reward in rewards.values() if not math.isnan(reward)]
    lengths = [len(sample.completion_ids) for sample in rollout.greedy]
    rollout.metrics["reward_greedy"] = math.fsum(scored) / max(len(scored), 1)
    rollout.metrics["completions/greedy_mean_length"] = sum(lengths) / len(lengths)


def is_informative(group: Sequence[Sample], tolerance: float = 1e-9) -> bool:
    """Whether the rewards of a group differ: otherwise every advantage in it is 0.

    Told by their range. A standard deviation is rounding noise where all agree; their mean says
    nothing of rewards that are neither 0 nor 1.

    Args:
        group: completions of one prompt; those without a reward are passed over.
        tolerance: difference that rounding explains, reward units.
    """
    rewards = [sample.reward for sample in group if not math.isnan(sample.reward)]
    return bool(rewards) and max(rewards) - min(rewards) > tolerance
