"""What ships inside the package: a model of under a million weights, and sums to train it on."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def resource(name: str) -> Path:
    """The path of a bundled file or folder.

    Args:
        name: relative to this folder: `tiny`, `arithmetic/train.jsonl`, `arithmetic/val.jsonl`.

    Raises:
        FileNotFoundError: if nothing of that name ships with the package.
    """
    path = _FOLDER / name
    if not path.exists():
        known = sorted(entry.name for entry in _FOLDER.iterdir() if not entry.name.startswith("_"))
        raise FileNotFoundError(f"lit_align ships no {name!r}; at its top level are {known}")
    return path
