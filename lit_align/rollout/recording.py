"""What a line of recorded rollouts must hold, and all lines of a file or folder by prompt."""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lit_align.errors import UserError
from lit_align.rollout.engine import Completion
from lit_align.rollout.rows import GREEDY

FINISH_REASONS = ("stop", "length")

_SHORT = reprlib.Repr()
_SHORT.maxlist, _SHORT.maxstring = 16, 80


class Recorded(NamedTuple):
    """A completion, where it stands, and its prompt as a message can show it."""

    completion: Completion
    place: str
    prompt: Any


# By the prompt's ids, the sample's number, and the policy's version.
Recordings = dict[tuple[int, ...], dict[int, dict[int, Recorded]]]


def read_recordings(path: Path) -> Recordings:
    """Every completion of a JSONL file, or of all of them in a folder.

    Raises:
        UserError: if there is nothing to read, or a line is broken, naming file and line.
    """
    found: Recordings = {}
    for file in _files(path):
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    _add(found, _parse(line, f"{file}, line {number}"), f"{file}, line {number}")
    if not found:
        raise UserError(f"{path} holds no recorded completion")
    return found


def shown(value: object) -> str:
    """A value as a message can show it: enough of a long one to tell which it is."""
    return _SHORT.repr(value)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        # What a policy answered in validation it is not to be trained on.
        files = sorted(f for f in path.glob("*.jsonl") if not f.name.startswith("validation-"))
        if not files:
            raise UserError(f"the folder {path} holds no .jsonl file of recorded rollouts")
        return files
    if not path.is_file():
        raise UserError(f"there is no file or folder {path} of recorded rollouts")
    return [path]


def _parse(line: bytes, place: str) -> Mapping[str, Any]:
    """The fields of a line, those that are read all as they must be."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: it is not JSON: {error}") from error
    if not isinstance(row, Mapping):
        raise UserError(f"{place}: a line must be an object, not {row!r}")
    _check_fields(row, place)
    return row


def _check_fields(row: Mapping[str, Any], place: str) -> None:
    for name, (is_right, wanted) in FIELDS.items():
        if row.get(name) is None and name in REQUIRED:
            raise UserError(f"{place}: there is no '{name}'")
        if row.get(name) is not None and not is_right(row[name]):
            raise UserError(f"{place}: '{name}' must be {wanted}, not {shown(row[name])}")
    logprobs, ids = row.get("logprobs"), row["completion_ids"]
    if logprobs is not None and len(logprobs) != len(ids):
        raise UserError(f"{place}: there are {len(logprobs)} 'logprobs' for {len(ids)} tokens")


def _add(found: Recordings, row: Mapping[str, Any], place: str) -> None:
    completion = Completion(row["completion_ids"], row.get("logprobs"), row["finish_reason"])
    recorded = Recorded(completion, place, row.get("prompt"))
    samples = found.setdefault(tuple(row["prompt_ids"]), {})
    # A resumed run writes again what it had written: the first is as good.
    samples.setdefault(row["sample"], {}).setdefault(row.get("version") or 0, recorded)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return _is_whole(value) or (type(value) is int and value == GREEDY)


def _is_ids(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and all(map(_is_whole, value))


def _is_logprobs(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(number, int | float) and -float("inf") < number <= 0 for number in value
    )


# What each field must be, and that in words.
FIELDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "prompt_ids": (_is_ids, "a list of token ids"),
    "completion_ids": (_is_ids, "a list of token ids"),
    "sample": (_is_number, f"a whole number >= 0, or {GREEDY} for the greedy completion"),
    "finish_reason": (lambda value: value in FINISH_REASONS, "'stop' or 'length'"),
    "logprobs": (_is_logprobs, "a list of finite numbers <= 0"),
    "version": (_is_whole, "a whole number >= 0"),
}
REQUIRED = frozenset({"prompt_ids", "completion_ids", "sample", "finish_reason"})
