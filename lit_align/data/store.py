"""Tokenised pairs on disk: written a few at a time, read through memory mapping.

A checksum beside the pairs tells a file that has gone bad since.
"""

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_info

from lit_align.data.cache import file_digest
from lit_align.data.summary import Summary
from lit_align.data.tokenise import Pair

PAIRS, META = "pairs.arrow", "meta.json"
IDS = pa.list_(pa.int32())
COLUMNS = pa.schema([(name, IDS) for name in Pair._fields])


class PairWriter:
    """Writes pairs into a folder, so that no data set has to fit in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stream = pa.ipc.new_stream(str(folder / PAIRS), COLUMNS)

    def write(self, pairs: Sequence[Pair]) -> None:
        if pairs:
            columns = [pa.array(column, IDS) for column in zip(*pairs, strict=True)]
            self._stream.write_batch(pa.record_batch(columns, schema=COLUMNS))

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
            return Dataset.from_file(str(folder / PAIRS)), Summary(**meta["summary"])
    rank_zero_info(f"the cached pairs in {folder} are damaged: tokenising again")
    shutil.rmtree(folder, ignore_errors=True)
    return None
