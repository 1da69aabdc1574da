"""A folder of things computed once, each in a place named after everything it was made from.

Such a place is filled under another name and renamed when it is whole, so that nobody reads half
of one, however the run that filled it ended.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from lit_align.errors import UserError


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of all caches: the one given, else $LIT_ALIGN_CACHE, else ~/.cache/lit_align."""
    chosen = cache_dir or os.environ.get("LIT_ALIGN_CACHE") or "~/.cache/lit_align"
    return Path(chosen).expanduser().absolute()


def digest(**parts: Any) -> str:
    """sha256, in hex, of named plain values; equal in every process."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256, in hex, of the bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A fresh folder that becomes `folder` if the block ends well and vanishes if it does not.

    Raises:
        UserError: if the cache cannot be written to.
    """
    scratch = folder.with_name(f".{folder.name}-{uuid4().hex}")
    try:
        scratch.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"cannot write to the cache folder {folder.parent} ({error.strerror}): "
            "name another with cache_dir or the variable LIT_ALIGN_CACHE"
        ) from error
    try:
        yield scratch
        _publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(scratch: Path, folder: Path) -> None:
    """Rename, unless another process was first: an equal name means equal content."""
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
