"""The order in which prompts are drawn, which can be taken up again anywhere."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from lit_align.errors import UserError
from lit_align.rollout.rows import Drawn


class SizedPrompts(Protocol):
    """Prompts by number."""

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Any: ...


class PromptStream:
    """Prompts without end: pass after pass over the data, each in an order of its own.

    The order is a function of seed and pass alone, and no prompt is skipped or drawn twice in a
    pass, however often a run is stopped.

    Args:
        prompts: the data, at least one.
        seed: of the order.
        shuffle: False: the rows in their order, every pass.
    """

    def __init__(self, prompts: SizedPrompts, *, seed: int = 0, shuffle: bool = True) -> None:
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self.drawn = 0

    def draw(self, count: int) -> list[Drawn]:
        """The next prompts: `count`, or fewer where a pass ends."""
        done, position = divmod(self.drawn, len(self.prompts))
        rows = self._order(done)[position : position + count]
        first = self.drawn
        self.drawn += len(rows)
        return [Drawn(first + n, done, self.prompts[row]) for n, row in enumerate(rows)]

    def state_dict(self) -> dict[str, Any]:
        """Where the next draw begins, and in what."""
        return {
            "drawn": self.drawn,
            "rows": len(self.prompts),
            "data": self.prompts.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            UserError: if the prompts or their order are others.
        """
        ours = self.state_dict()
        for name in ("rows", "data", "seed", "shuffle"):
            if state[name] != ours[name]:
                raise UserError(
                    f"cannot resume: the checkpoint was written with {name}={state[name]} in the "
                    f"prompts, not {ours[name]}; resume with the same prompts, seed and shuffling"
                )
        self.drawn = state["drawn"]

    def _order(self, done: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.prompts)))
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + done) % 2**63)
        return torch.randperm(len(self.prompts), generator=generator).tolist()
