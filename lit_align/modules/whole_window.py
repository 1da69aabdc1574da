"""Losses that compare the rows of an optimizer step with each other, however the step is cut.

Before the first micro-batch of a step (its window) is trained on, a pass without gradients says of
every row of the step, on every rank, what the loss reads. Then each micro-batch in turn computes
the loss of the whole step, with its own rows live in the place of those numbers: the gradients add
up to that of the whole.

That holds as far as both passes compute the same. They run in training mode and from the same
random state, so that dropout leaves out the same.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_align.errors import UserError
from lit_align.modules.inference import reshard
from lit_align.modules.policy import PolicyModule
from lit_align.modules.ranks import from_all_replicas
from lit_align.modules.window import replica

# By name, one entry for each row: (B,) or (B, T). Two are for us: `key`, (B, K) int64, by which a
# row is known, and `is_real`, (B,) bool, without which it is left out.
Rows = dict[str, Tensor]


class WholeWindow:
    """All real rows of an optimizer step, sorted by their keys.

    Args:
        parts: the rows of its micro-batches on all ranks, in any order.
    """

    def __init__(self, parts: Sequence[Rows]) -> None:
        rows = _joined([{name: row.detach() for name, row in part.items()} for part in parts])
        keys = [tuple(key) for key in rows["key"].tolist()]
        real = rows["is_real"].tolist()
        order = sorted((n for n, counts in enumerate(real) if counts), key=keys.__getitem__)
        self.rows = {name: values[order] for name, values in rows.items()}
        self._places = {keys[n]: place for place, n in enumerate(order)}

    def around(self, own: Rows) -> tuple[Rows, Tensor]:
        """The rows of the step with those of a micro-batch of it, which may carry gradients.

        Returns:
            The rows, and which of them are the micro-batch's own, (N,) bool.
        """
        real = own["is_real"]
        keys = [tuple(key) for key in own["key"][real].tolist()]
        places = torch.tensor([self._places[key] for key in keys], dtype=torch.int64)
        places = places.to(real.device)
        rows = dict(self.rows)
        for name in (name for name, values in own.items() if values.requires_grad):
            live = _as_wide_as(rows[name], own[name])[real]
            rows[name] = rows[name].index_copy(0, places, live)
        is_own = torch.zeros_like(rows["is_real"]).index_fill(0, places, value=True)
        return rows, is_own


class Windows:
    """The window that is being trained on."""

    def __init__(self) -> None:
        self._open: WholeWindow | None = None
        self._left = 0

    def look_ahead(
        self,
        module: PolicyModule,
        batch: Mapping[str, Any],
        rows_of: Callable[[Mapping[str, Any]], Rows],
        mask: Tensor,
        title: str,
    ) -> None:
        """Find out what is constant of a window, if this batch is its first; all ranks together.

        Args:
            module: in training.
            batch: holds its `window` if it is the first of one that has other parts.
            rows_of: what a loss reads of a batch.
            mask: rows of the batch that count in its `window_pairs` or `window_rows`, (B,) bool.
            title: what messages call the loss.

        Raises:
            UserError: if the batch is a part of a window, and nobody told of the others.
        """
        if "window" not in batch:
            if not self.is_open:
                _refuse_a_part(module, batch, mask, title)
            return
        parts: list[Rows] = []
        with torch.no_grad():
            for ahead, part in enumerate(batch["window"]):
                module.seed_step(ahead)
                parts.append(rows_of(part))
        module.seed_step()
        # Under older versions of torch autocast keeps the weights it has cast, which have no
        # gradient here: https://github.com/pytorch/pytorch/issues/65766.
        torch.clear_autocast_cache()
        reshard(module.policy)
        self._open = WholeWindow(_of_all_replicas(module, parts))
        self._left = len(parts)

    @property
    def is_open(self) -> bool:
        """Whether the micro-batch to come is a part of a window that was looked at."""
        return self._open is not None

    def around(self, own: Rows) -> tuple[Rows, Tensor]:
        """As `WholeWindow.around`; a micro-batch outside of any window is one of its own."""
        window = self._open or WholeWindow([own])
        self._left = max(self._left - 1, 0)
        if not self._left:
            self._open = None
        return window.around(own)

    def forget(self) -> None:
        """There is no window, whatever a run that was stopped has left."""
        self._open, self._left = None, 0


def _refuse_a_part(
    module: PolicyModule, batch: Mapping[str, Any], mask: Tensor, title: str
) -> None:
    """A loader of the user's own may know nothing of windows."""
    trainer = module.trainer
    counted = [batch[name] for name in ("window_pairs", "window_rows") if name in batch]
    parts = trainer.accumulate_grad_batches * replica(trainer)[1]
    if counted[0] > mask.sum() if counted else parts > 1:
        raise UserError(
            f"{title} compares the rows of an optimizer step with each other, and this loader "
            "hands over a part of one without the others: use a data module of lit_align, or "
            "train on one rank with trainer.accumulate_grad_batches=1"
        )


def _of_all_replicas(module: PolicyModule, parts: Sequence[Rows]) -> list[Rows]:
    """The rows of all ranks' micro-batches, on this rank's device."""
    mine = [{name: values.detach().cpu() for name, values in part.items()} for part in parts]
    everybodys = [part for parts in from_all_replicas(module.trainer, mine) for part in parts]
    return [
        {name: values.to(module.device) for name, values in part.items()} for part in everybodys
    ]


def _joined(parts: Sequence[Rows]) -> Rows:
    """What all parts have, one below the other, as wide as the widest."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: _stacked([part[name] for part in parts]) for name in names}


def _stacked(blocks: Sequence[Tensor]) -> Tensor:
    widest = max(blocks, key=lambda block: block.shape[-1] if block.dim() > 1 else 0)
    return torch.cat([_as_wide_as(widest, block) for block in blocks])


def _as_wide_as(other: Tensor, block: Tensor) -> Tensor:
    """A block of rows with columns of 0 to the right; one of single numbers as it is."""
    return F.pad(block, (0, other.shape[1] - block.shape[1])) if block.dim() > 1 else block
