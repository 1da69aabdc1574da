"""Where rows come from: files, folders and the hub, all as (place, row).

JSON is read here line by line rather than through `datasets`, which would infer one schema for
the whole file and could not say which line is wrong.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from lit_align.data.cache import file_digest
from lit_align.data.rows import COLUMNS, REQUIRED, RowError
from lit_align.errors import UserError

Placed = Iterator[tuple[str, object]]
READ_AT_ONCE = 1000


class RowSource(Protocol):
    """Rows that have not been read yet."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def __iter__(self) -> Placed:
        """Each row with the words that say where it stands; a `RowError` for an unreadable one."""


class Source(RowSource, Protocol):
    """A data set that has not been read yet."""

    def content(self) -> str:
        """Identity of what is in it: equal content, equal text, wherever it lies."""


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are read; rows of JSON come whole.

    Args:
        required: must be there.
        known: those that mean something, in the order in which they are read; None: all.
    """

    required: tuple[str, ...]
    known: tuple[str, ...] | None = None

    def of(self, name: str, columns: list[str]) -> list[str]:
        """Those to read of the columns of a table."""
        for column in self.required:
            if column not in columns:
                raise UserError(f"{name} has no column '{column}' (it has: {', '.join(columns)})")
        found = [column for column in self.known or columns if column in columns]
        if not found:
            raise UserError(
                f"{name} has none of the columns {', '.join(self.known or ())} "
                f"(it has: {', '.join(columns)})"
            )
        return found


PAIRS = Columns(REQUIRED, COLUMNS)


@dataclass(frozen=True)
class JsonLines:
    """One JSON object a line; empty lines do not count."""

    name: str
    path: Path
    columns: Columns = PAIRS

    def content(self) -> str:
        return file_digest(self.path)

    def __iter__(self) -> Placed:
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"line {number}", _parse(line)


def _parse(line: bytes) -> object:
    try:
        return json.loads(line.rstrip())
    except UnicodeDecodeError as error:
        return RowError(f"it is not UTF-8: {error.reason} at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return RowError(f"it is not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return RowError("its JSON is nested too deeply")


@dataclass(frozen=True)
class JsonList:
    """One JSON list of objects."""

    name: str
    path: Path
    columns: Columns = PAIRS

    def content(self) -> str:
        return file_digest(self.path)

    def __iter__(self) -> Placed:
        try:
            rows = json.loads(self.path.read_bytes())
        except json.JSONDecodeError as error:
            raise UserError(
                f"{self.name}, line {error.lineno}: it is not JSON: {error.msg} at column "
                f"{error.colno} (a file with one object a line must be called .jsonl)"
            ) from error
        except ValueError as error:
            raise UserError(f"{self.name} is not UTF-8: {error}") from error
        if not isinstance(rows, list):
            raise UserError(f"{self.name} must hold a list of objects, not one object")
        return ((f"item {number}", row) for number, row in enumerate(rows, 1))


@dataclass(frozen=True)
class Parquet:
    """A Parquet file."""

    name: str
    path: Path
    columns: Columns = PAIRS

    def content(self) -> str:
        return file_digest(self.path)

    def __iter__(self) -> Placed:
        with _open_parquet(self) as file:
            columns = self.columns.of(self.name, file.schema_arrow.names)
            number = 0
            for batch in file.iter_batches(READ_AT_ONCE, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row


def _open_parquet(source: Parquet) -> Any:
    try:
        return pq.ParquetFile(source.path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{source.name} is not a Parquet file: {error}") from error


@dataclass(frozen=True)
class Table:
    """A data set of the `datasets` library."""

    name: str
    dataset: Dataset
    columns: Columns = PAIRS

    def content(self) -> str:
        columns = self.columns.of(self.name, self.dataset.column_names)
        # The library's own fingerprint differs between processes for a data set that has passed
        # through a function.
        content = hashlib.sha256(repr(columns).encode())
        chunks = self.dataset.select_columns(columns).with_format("arrow").iter(READ_AT_ONCE)
        for chunk in chunks:
            for batch in chunk.combine_chunks().to_batches():
                content.update(batch.serialize())
        return content.hexdigest()

    def __iter__(self) -> Placed:
        columns = self.columns.of(self.name, self.dataset.column_names)
        for number, row in enumerate(self.dataset.select_columns(columns), 1):
            yield f"row {number}", row


@dataclass(frozen=True)
class Listed:
    """Rows that are in memory already."""

    rows: Sequence[object]
    name: str = "the rows given"

    def __iter__(self) -> Placed:
        return ((f"item {number}", row) for number, row in enumerate(self.rows, 1))


FILES: dict[str, Callable[[str, Path, Columns], Source]] = {
    ".json": JsonList,
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".parquet": Parquet,
}


def open_source(path: str | PathLike[str], split: str, columns: Columns = PAIRS) -> Source:
    """The data set that a file, a folder or a name on the hub stands for.

    Args:
        path: of a JSONL, JSON or Parquet file, or of a folder written by `save_to_disk`; else a
            name on the hub, `name`, `owner/name` or with `:configuration` at its end.
        split: which part of a folder or hub data set; a file has only "train", all of it.
        columns: of tables, which to read.

    Raises:
        UserError: if there is no such file, format, name or split.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        return _from_folder(place, split, columns)
    if place.is_file():
        return _from_file(place, split, columns)
    if place.suffix in FILES or place.is_absolute() or len(place.parts) > len(("owner", "name")):
        raise UserError(f"there is no file {path}")
    return _from_hub(str(path), split, columns)


def _from_file(path: Path, split: str, columns: Columns) -> Source:
    if path.suffix not in FILES:
        raise UserError(
            f"{path.name}: files of the kind '{path.suffix}' cannot be read (known: "
            f"{', '.join(FILES)}, folders written by save_to_disk, and names on the hub)"
        )
    if split != "train":
        raise UserError(f"{path.name} is a single file and has no split '{split}'")
    return FILES[path.suffix](path.name, path, columns)


def _from_folder(path: Path, split: str, columns: Columns) -> Source:
    if not any((path / mark).exists() for mark in ("state.json", "dataset_dict.json")):
        return _from_hub(str(path), split, columns)
    try:
        data = load_from_disk(str(path))
    # Arrow and the library have an exception of their own for each way to be broken.
    except Exception as error:
        raise UserError(f"the data set in {path} cannot be read: {error}") from error
    if isinstance(data, DatasetDict):
        if split not in data:
            raise UserError(f"{path.name} has no split '{split}' (it has: {', '.join(data)})")
        return Table(f"{path.name} ({split})", data[split], columns)
    if split != "train":
        raise UserError(f"{path.name} is a single data set and has no split '{split}'")
    return Table(path.name, data, columns)


def _from_hub(path: str, split: str, columns: Columns) -> Source:
    name, _, configuration = path.partition(":")
    try:
        data = load_dataset(name, configuration or None, split=split)
    # Missing, private, unreachable, of an unknown configuration or split: the library has one
    # exception for each and says in it what is the case.
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise UserError(
            f"'{path}' is neither a file nor a folder of datasets' save_to_disk, and as a data set "
            f"it cannot be loaded: {error}"
        ) from error
    return Table(f"{Path(name).name} ({split})", data, columns)
