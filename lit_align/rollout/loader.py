"""From prompts to micro-batches: the loader that asks the policy for completions when it has none.

Lightning takes any sized iterable with a state for a resumable loader. It is sized, for Lightning
reads one batch ahead of what has no length: completions would be written by weights that are a step
old. It is no `DataLoader`, for nothing here may happen in another process.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from typing import Any, Protocol

import torch

from lit_align.errors import UserError
from lit_align.rollout.batches import collate, filler, window_stamps, with_window
from lit_align.rollout.plan import RolloutPlan, Window, cut, steps_of
from lit_align.rollout.rows import Drawn, Rollout, Sample
from lit_align.rollout.stream import PromptStream

# Of the values, only `window` is no tensor: a list of batches.
Batch = dict[str, Any]
# What may not change within a run.
SIZES = ("prompts_per_step", "num_generations", "steps_per_rollout", "num_iterations")


class Actor(Protocol):
    """What the loader asks of the module in training; every rank asks at the same time."""

    def make_rollout(
        self, draw: Callable[[int], list[Drawn]], plan: RolloutPlan, number: int
    ) -> Rollout:
        """Completions of freshly drawn prompts, scored and filtered, the same on every rank."""

    def finish_rollout(
        self, rollout: Rollout, plan: RolloutPlan, mine: Iterable[tuple[list[Sample], Batch]]
    ) -> None:
        """Give every sample what training compares it with, and its advantage.

        Args:
            rollout: on every rank the same.
            plan: how it is going to be cut.
            mine: the micro-batches of this rank: their samples and their tensors, which are made
                as they are asked for. Every rank has as many.
        """


class RolloutLoader:
    """Micro-batches of completions that the policy in training has just written.

    A rollout serves `plan.batches` micro-batches on each rank; then the next one is made. To what
    `collate` makes, each batch adds the counts of its window (`window_stamps`), and `is_fresh` (),
    bool: whether the policy is still the one that wrote the completions.

    An epoch begins with a window, but not always with a rollout: what an epoch leaves of one, the
    next goes on with. Where `limit_batches` ends an epoch within a window, the window's counts are
    those of its micro-batches up to there, and the rest of it is dropped, as Lightning makes the
    optimizer step.

    If `whole_window`, the first batch of a window that has other batches or other ranks holds, as
    `window`, all batches of the window on this rank, in order, itself included.

    Args:
        stream: of prompts.
        actor: makes rollouts.
        plan: the sizes.
        rank: of this process among `plan.replicas`.
        limit_batches: micro-batches of an epoch (int) or share of them (float), or a function.
        whole_window: whether a window is looked at as a whole before it is trained on.
    """

    def __init__(
        self,
        stream: PromptStream,
        actor: Actor,
        plan: RolloutPlan,
        *,
        rank: int = 0,
        limit_batches: float | Callable[[], float] = 1.0,
        whole_window: bool = False,
    ) -> None:
        self.stream = stream
        self.actor = actor
        self.plan = plan
        self.rank = rank
        self.limit_batches = limit_batches
        self.whole_window = whole_window
        self.rollout: Rollout | None = None
        self._rollouts_made = 0
        self._windows_done = 0  # of the rollout
        self._epoch_done = 0  # micro-batches

    def __len__(self) -> int:
        """Micro-batches of an epoch: as many as a pass over the prompts takes without refills."""
        rollouts = math.ceil(len(self.stream.prompts) / self.plan.prompts)
        return rollouts * self.plan.batches

    def __iter__(self) -> Iterator[Batch]:
        """An epoch from its start, or, once after `load_state_dict`, the rest of it."""
        # In a generator nothing happens before the first batch is asked for: Lightning calls
        # iter() early and more than once.
        last = self._epoch_batches()
        done = self._epoch_done if self._epoch_done < last else 0
        windows = self._windows()
        while done < last:
            # An epoch begins with a window.
            first = done % self.plan.micro_batches
            for batch in self._batches(next(windows)[: first + last - done], first):
                # Lightning never asks a sized loader for more than its batches: what must have
                # happened by the end of the epoch happens before its last batch is handed over.
                done += 1
                self._epoch_done = done % last
                if done % self.plan.micro_batches == 0 or done == last:
                    self._end_window()
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position, and the rollout that is being trained on: tensors and plain values."""
        return {
            "sizes": {name: getattr(self.plan, name) for name in SIZES},
            "micro_batches": self.plan.micro_batches,
            "stream": self.stream.state_dict(),
            "rollout": None if self.rollout is None else self.rollout.state_dict(),
            "rollouts_made": self._rollouts_made,
            "windows_done": self._windows_done,
            "epoch_done": self._epoch_done,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, after an epoch with fewer micro-batches or on more ranks if need be.

        Raises:
            UserError: if the prompts or their order are others, a rollout is cut otherwise, or no
                window begins there.
        """
        self._check(state)
        self.stream.load_state_dict(state["stream"])
        saved = state["rollout"]
        self.rollout = None if saved is None else Rollout.from_state(saved)
        self._rollouts_made = state["rollouts_made"]
        self._windows_done = state["windows_done"]
        self._epoch_done = state["epoch_done"]

    def _check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state in which this loader would not go on as the one that was saved."""
        for name, value in state["sizes"].items():
            if value != getattr(self.plan, name):
                raise UserError(
                    f"cannot resume: the checkpoint was written with data.{name}={value}, not "
                    f"{getattr(self.plan, name)}; only data.batch_size, data.max_tokens_per_batch "
                    "and the number of ranks may change"
                )
        done, theirs, ours = state["epoch_done"], state["micro_batches"], self.plan.micro_batches
        # Lightning goes on counting micro-batches; its counter starts anew only where that is past
        # the end of an epoch.
        if (done and ours != theirs) or (state["rollouts_made"] and ours > theirs):
            raise UserError(
                f"cannot resume with {ours} micro-batches to a step, where there were {theirs}: "
                f"take a data.batch_size (or max_tokens_per_batch) or a number of ranks that makes "
                f"{theirs} of them; only after an epoch they may be fewer"
            )

    def _epoch_batches(self) -> int:
        """Micro-batches of an epoch, cut as Lightning cuts them."""
        limit = self.limit_batches() if callable(self.limit_batches) else self.limit_batches
        return min(len(self), limit) if isinstance(limit, int) else int(len(self) * limit)

    def _windows(self) -> Iterator[Window]:
        """The windows from here on, without end."""
        while True:
            if self.rollout is None:
                self._make_rollout()
            assert self.rollout is not None
            iteration, step = divmod(self._windows_done, self.plan.steps_per_rollout)
            yield from self._cut(self.rollout, iteration)[step:]

    def _make_rollout(self) -> None:
        # A checkpoint may be written meanwhile, by a signal or after an error. Until the rollout is
        # complete the loader stands where it stood, so that nothing is lost or half done.
        ahead = copy(self.stream)
        rollout = self.actor.make_rollout(ahead.draw, self.plan, self._rollouts_made)
        shares = [shares[self.rank] for window in self._cut(rollout, 0) for shares in window]
        mine = ((share, _tensors(share, rollout)) for share in shares)
        self.actor.finish_rollout(rollout, self.plan, mine)
        self.stream.drawn, self.rollout = ahead.drawn, rollout
        self._rollouts_made += 1

    def _cut(self, rollout: Rollout, iteration: int) -> list[Window]:
        """The windows of one pass over a rollout."""
        seed = (self.stream.seed * 1_000_003 + rollout.number * 1009 + iteration) % 2**63
        return [cut(step, self.plan) for step in steps_of(rollout.groups(), self.plan, seed)]

    def _batches(self, window: Window, first: int) -> Iterator[Batch]:
        """The micro-batches of a window from `first` on, tensors on this rank."""
        assert self.rollout is not None
        rollout, stamps = self.rollout, window_stamps(window, self.rank)
        is_fresh = {"is_fresh": torch.tensor(self._windows_done == 0)}
        batches = (
            _tensors(shares[self.rank], rollout) | stamp | is_fresh
            for shares, stamp in list(zip(window, stamps, strict=True))[first:]
        )
        has_others = (len(window) - first) * self.plan.replicas > 1
        return with_window(batches) if self.whole_window and has_others else batches

    def _end_window(self) -> None:
        self._windows_done += 1
        if self._windows_done == self.plan.steps:
            self.rollout, self._windows_done = None, 0


def _tensors(share: list[Sample], rollout: Rollout) -> Batch:
    """A rank's share of a micro-batch, or what stands in for none."""
    return collate(share) if share else filler(rollout.samples)
