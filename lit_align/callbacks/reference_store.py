"""Reference log-probs on disk: one folder per way to compute them, one entry per response.

Nothing is ever changed in place: parts are added under temporary names and renamed, so whoever
reads sees whole parts only, and several runs may fill one folder at the same time.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lit_align.errors import UserError

# Part of every key: raise it when equal keys would no longer mean equal numbers.
SCHEMA = 1


class Scored(NamedTuple):
    """What is kept of a response: the sum of its log-probs, in nats, and its scored tokens."""

    logps: float
    tokens: int


def row_key(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> bytes:
    """Identity of a response to a prompt, 16 bytes: the token ids and which of them are scored."""
    ids = torch.tensor([len(prompt_ids), *prompt_ids, *response_ids], dtype=torch.int64)
    return hashlib.blake2b(ids.numpy().tobytes(), digest_size=16).digest()


def store_key(how: Mapping[str, Any]) -> str:
    """Identity of a way to compute log-probs: the first half of its sha256, in hex."""
    return hashlib.sha256(_json(how).encode()).hexdigest()[:32]


class ReferenceStore:
    """The log-probs computed in one way, of whatever responses they have been computed for.

    Args:
        folder: where all stores are.
        how: everything that the numbers depend on besides the response; plain values.
    """

    def __init__(self, folder: str | os.PathLike[str], how: Mapping[str, Any]) -> None:
        self.how = {"schema": SCHEMA, **how}
        self.key = store_key(self.how)
        self.folder = Path(folder) / self.key

    def read(self) -> dict[bytes, Scored]:
        """All entries by row key.

        Raises:
            UserError: naming the file, if one is damaged.
        """
        found: dict[bytes, Scored] = {}
        if (meta := self.folder / "meta.json").exists() and meta.read_text() != _json(self.how):
            raise _damaged(meta, "it does not describe this folder")
        for path in sorted(self.folder.glob("part-*.safetensors")):
            found.update(_read_part(path))
        return found

    def add(self, rows: Mapping[bytes, Scored], dtype: torch.dtype) -> None:
        """Write one more part.

        Args:
            rows: new entries by row key; nothing is written without any.
            dtype: float32, or float64 for a float64 model.
        """
        if not rows:
            return
        part = {
            "keys": torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(-1, 16),
            "logps": torch.tensor([row.logps for row in rows.values()], dtype=dtype),
            "tokens": torch.tensor([row.tokens for row in rows.values()], dtype=torch.int32),
        }
        checksum = _checksum(part)
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / "meta.json", _json(self.how).encode())
        # Named by content: two runs that compute the same rows write the same file.
        name = f"part-{checksum[:32]}.safetensors"
        _write(self.folder / name, save(part, metadata={"checksum": checksum}))


def _read_part(path: Path) -> dict[bytes, Scored]:
    """Entries of one part, by row key."""
    try:
        with safe_open(path, framework="pt") as file:
            checksum = (file.metadata() or {}).get("checksum")
            part = {name: file.get_tensor(name) for name in ("keys", "logps", "tokens")}
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from error
    if checksum != _checksum(part):
        raise _damaged(path, "its checksum is wrong")
    keys = [bytes(key) for key in part["keys"].numpy()]
    values = zip(part["logps"].tolist(), part["tokens"].tolist(), strict=True)
    return {key: Scored(*value) for key, value in zip(keys, values, strict=True)}


def _damaged(path: Path, why: str) -> UserError:
    return UserError(
        f"the reference cache is damaged: {path}: {why}. Delete this file and run again: "
        "only what it held is computed anew"
    )


def _checksum(part: Mapping[str, Tensor]) -> str:
    """Sha256, in hex, of the bytes of all tensors."""
    digest = hashlib.sha256()
    for name in sorted(part):
        digest.update(part[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _json(how: Mapping[str, Any]) -> str:
    """One text for equal descriptions."""
    return json.dumps(how, sort_keys=True, indent=1, default=str)


def _write(path: Path, content: bytes) -> None:
    """Put a whole file in place at once; a file that is there already is the same and may stay."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
