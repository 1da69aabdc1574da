"""Pairs of token ids as the data sets of both sides."""

from collections.abc import Sequence

from datasets import Dataset
from text import Pair

from lit_align import PreferenceDataModule
from lit_align.data.pairs import PairRows


def columns(pairs: Sequence[Pair]) -> dict[str, list[list[int]]]:
    """Token ids, by the names that both sides give them."""
    return {
        f"{name}_ids": [list(getattr(pair, name)) for pair in pairs]
        for name in ("prompt", "chosen", "rejected")
    }


class GivenPairs(PreferenceDataModule):
    """Pairs that are token ids already.

    Args:
        pairs: of all batches, in their order.
        batch_size: pairs of a batch.
    """

    def __init__(self, pairs: Sequence[Pair], batch_size: int) -> None:
        super().__init__("given", val_split=None, batch_size=batch_size, shuffle=False)
        self._given = Dataset.from_dict(columns(pairs))

    def prepare_data(self) -> None:
        """Nothing."""

    def setup(self, stage: str | None = None) -> None:
        self.train_rows, self.val_rows = PairRows(self._given), PairRows(self._given, [])
