"""Numbers kept per row of a data set: what the reference says of each pair."""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lit_align.errors import UserError

# What torch.load says of half a file, of another format, and we of other contents.
_UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, RuntimeError),
    *(AttributeError, TypeError, ValueError),
)


class TensorCache:
    """Tensors with one entry per row of the data set, looked up by the row's index.

    Args:
        tensors: by name, (N, ...) each: `chosen_logps` and `rejected_logps`, nats, for
            `compute_loss`. NaN marks a row that was not computed.

    Raises:
        ValueError: if there are none, or their numbers of rows differ.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        rows = {name: len(tensor) for name, tensor in tensors.items()}
        if len(set(rows.values())) != 1:
            raise ValueError(f"a cache needs tensors with equally many rows, not {rows}")
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def __len__(self) -> int:
        """Rows of the data set."""
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: Tensor) -> dict[str, Tensor]:
        """The entries of the rows in `index`, (B,), int64: (B, ...) each, on its device.

        Raises:
            UserError: if a row is not in the cache; the message names its index.
        """
        if index.is_floating_point() or index.dtype == torch.bool:
            raise ValueError(f"rows are looked up by integer index, not {index.dtype}")
        ids = index.cpu()
        # Python's negative indices would answer for the last rows.
        self._refuse(ids, (ids < 0) | (ids >= len(self)))
        rows = {name: tensor[ids.to(tensor.device)] for name, tensor in self.tensors.items()}
        for values in rows.values():
            self._refuse(ids, ~values.isfinite().unsqueeze(-1).flatten(1).all(1).cpu())
        return {name: values.to(index.device) for name, values in rows.items()}

    def to_disk(self, path: str | Path) -> None:
        """Write the cache to `path` such that nobody ever reads half of it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            # A slice would be written with the whole of what it was cut from.
            torch.save({name: t.cpu().clone() for name, t in self.tensors.items()}, unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def from_disk(cls, path: str | Path) -> "TensorCache":
        """Read what `to_disk` wrote, onto the CPU.

        Raises:
            UserError: if the file is missing or holds something else.
        """
        try:
            return cls(torch.load(path, map_location="cpu", weights_only=True))
        except FileNotFoundError:
            raise UserError(f"no reference cache at {path}") from None
        except _UNREADABLE as why:
            raise UserError(f"{path} is not a reference cache: delete it to make it anew") from why

    def _refuse(self, index: Tensor, absent: Tensor) -> None:
        """Raise UserError naming the rows of `index` that are `absent`."""
        if absent.any():
            rows = ", ".join(map(str, index[absent].tolist()))
            raise UserError(
                f"the reference cache of {len(self)} rows has no numbers for row {rows}: "
                "it was made from other data or not to the end; delete it to make it anew"
            )
