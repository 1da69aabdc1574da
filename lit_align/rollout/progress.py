"""Completions in the making: which tokens were drawn, and who has finished."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_align.rollout.engine import Completion, Sampling
from lit_align.rollout.sampling import cut_at_stop, token_sampler, uniforms_of

# Moving the cache costs about what one decoding step does: wait until this share has finished.
WORTH_LEAVING = 1 / 8


class Progress:
    """Completions that are decoded together, one row each until they have finished.

    Args:
        seeds: of the completions.
        rooms: how many tokens each may have, >= 1.
        sampling: how tokens are chosen and what stops.
        device: the model's.
    """

    def __init__(
        self, seeds: Sequence[int], rooms: Sequence[int], sampling: Sampling, device: torch.device
    ) -> None:
        home = _drawing_device(device)
        shape = len(seeds), max(rooms)
        self._draw = token_sampler(sampling)
        self._stop_set = frozenset(sampling.stop_token_ids)
        self._stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=home)
        self._rooms = torch.tensor(rooms, device=home)
        self._uniforms = torch.stack([uniforms_of(seed, max(rooms)) for seed in seeds]).to(home)
        self._ids = torch.zeros(shape, dtype=torch.long, device=home)
        self._logprobs: list[tuple[Tensor, Tensor]] = []
        # Of the rows that are still in the batch: which completion each is, and whether it is over.
        self._numbers = torch.arange(len(seeds), device=home)
        self.done = torch.zeros(len(seeds), dtype=torch.bool, device=home)
        self.left = len(seeds)

    def draw(self, logits: Tensor) -> Tensor:
        """One more token for each row of the batch: (B, V) to (B,) ids."""
        step = len(self._logprobs)
        choice = self._draw(logits.to(self._uniforms.device), self._uniforms[self._numbers, step])
        self._ids[self._numbers, step] = choice.ids
        self._logprobs.append((self._numbers, choice.logprobs))
        full = self._rooms[self._numbers] <= step + 1
        self.done = self.done | full | torch.isin(choice.ids, self._stops)
        self.left = int((~self.done).sum())
        return choice.ids

    def leave(self) -> Tensor | None:
        """Let finished rows go if that is worth it: the rows that stay, (B',), or None for all."""
        finished = len(self.done) - self.left
        if not finished or finished < WORTH_LEAVING * len(self.done):
            return None
        stay = (~self.done).nonzero().squeeze(-1)
        self._numbers, self.done = self._numbers[stay], self.done[stay]
        return stay

    def completions(self) -> list[Completion]:
        """Each up to its end: what was drawn after that only kept the batch together."""
        logprobs = torch.zeros(
            self._ids.shape, dtype=self._logprobs[0][1].dtype, device=self._ids.device
        )
        for step, (numbers, values) in enumerate(self._logprobs):
            logprobs[numbers, step] = values
        rows = zip(self._ids.tolist(), logprobs.tolist(), self._rooms.tolist(), strict=True)
        found = []
        for ids, values, room in rows:
            kept, reason = cut_at_stop(ids[:room], self._stop_set)
            found.append(Completion(kept, values[: len(kept)], reason))
        return found


def _drawing_device(device: torch.device) -> torch.device:
    """Where tokens are drawn: with the model, unless its device cannot sum as it must.

    Apple's GPUs have no float64, and CUDA refuses cumulative sums where a run is to be
    deterministic.
    """
    refuses = device.type == "cuda" and torch.are_deterministic_algorithms_enabled()
    return torch.device("cpu") if refuses or device.type == "mps" else device
