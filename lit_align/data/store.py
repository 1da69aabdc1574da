"""Tokenised pairs on disk: written a few at a time, read through memory mapping.

A checksum beside the pairs tells a file that has gone bad since.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_info

from lit_align.data.cache import file_digest
from lit_align.data.summary import Summary
from lit_align.data.tokenise import Completion, Pair
from lit_align.losses import PAIR_COLUMNS, WITHOUT_VALUE

PAIRS, META = "pairs.arrow", "meta.json"
IDS, NUMBER = pa.list_(pa.int32()), pa.float32()
Row = tuple[Pair | Completion, Mapping[str, float]]


class PairWriter:
    """Writes pairs into a folder, so that no data set has to fit in memory.

    Which columns of numbers there are is known only at the end: all are written, and those that
    no row has a value in are left out by whoever reads.
    """

    def __init__(self, folder: Path, ids: Sequence[str], numbers: Sequence[str]) -> None:
        self.folder = folder
        self.numbers = numbers
        self.schema = pa.schema([*((n, IDS) for n in ids), *((n, NUMBER) for n in numbers)])
        self._stream = pa.ipc.new_stream(str(folder / PAIRS), self.schema)

    def write(self, rows: Sequence[Row]) -> None:
        """Pairs of token ids with their numbers."""
        if not rows:
            return
        ids = [pa.array(column, IDS) for column in zip(*(pair for pair, _ in rows), strict=True)]
        numbers = [
            pa.array([given.get(name, WITHOUT_VALUE.get(name)) for _, given in rows], NUMBER)
            for name in self.numbers
        ]
        self._stream.write_batch(pa.record_batch([*ids, *numbers], schema=self.schema))

    def abandon(self) -> None:
        """End the file without vouching for it."""
        self._stream.close()

    def close(self, summary: Summary) -> None:
        """End the file and vouch for it."""
        self._stream.close()
        meta = {"sha256": file_digest(self.folder / PAIRS), "summary": asdict(summary)}
        (self.folder / META).write_text(json.dumps(meta, indent=1))


def stored(folder: Path) -> tuple[Dataset, Summary] | None:
    """The pairs of a folder and their summary; None if it is not there.

    A folder that is there and cannot be trusted is removed, which makes room for a new one.
    """
    if not folder.exists():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        meta = json.loads((folder / META).read_text())
        if file_digest(folder / PAIRS) == meta["sha256"]:
            summary = Summary(**meta["summary"])
            pairs = Dataset.from_file(str(folder / PAIRS))
            empty = PAIR_COLUMNS.keys() - summary.columns
            return pairs.select_columns([n for n in pairs.column_names if n not in empty]), summary
    rank_zero_info(f"the cached pairs in {folder} are damaged: tokenising again")
    shutil.rmtree(folder, ignore_errors=True)
    return None
