"""Golden cases: the files of a folder, what is compared, and which of them we overrule.

The format is described in tests/golden/README.md.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parent / "golden"
FOLDER = Path(os.environ.get("LIT_ALIGN_GOLDEN", HERE))
NONFINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


@dataclass(frozen=True)
class Case:
    """One case of one file; `file` is that file's top level."""

    raw: Mapping[str, Any]
    file: Mapping[str, Any] = field(repr=False)

    @property
    def id(self) -> str:
        return self.raw["id"]

    @property
    def variant(self) -> str:
        return self.raw["variant"]

    @property
    def params(self) -> Mapping[str, Any]:
        return self.raw["params"]

    def tensors(self) -> dict[str, Tensor]:
        """The inputs; whatever is differentiable requires a gradient."""
        tensors = {name: tensor(value) for name, value in self.raw["inputs"].items()}
        return {n: t.requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}


class Result(NamedTuple):
    """What our code makes of a case.

    `loss` is what the case's gradients are gradients of; `wrt` holds what they are taken with
    respect to, where that is no input: a tensor, or several, whose joint norm is meant.
    """

    outputs: Mapping[str, Any]
    loss: Tensor | None = None
    wrt: Mapping[str, Tensor | tuple[Tensor, ...]] = {}


class Overruled(NamedTuple):
    """A reading of a paper that we do not share: the cases, and where they must differ from us."""

    pattern: str
    differs_in: tuple[str, ...]
    reason: str


class NotOffered(NamedTuple):
    """Cases of something that is not here, and why."""

    pattern: str
    reason: str


def load() -> list[Case]:
    """Every case of every file, in the order of the files."""
    files = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    return [Case(raw, file) for file in files for raw in file["cases"]]


def read_overruled() -> list[Overruled]:
    """The first table of DISAGREEMENTS.md: three columns, code in backquotes."""
    return [
        Overruled(pattern.strip("`"), tuple(re.findall("`(.+?)`", differs_in)), reason)
        for pattern, differs_in, reason in _table(columns=3)
    ]


def read_not_offered() -> list[NotOffered]:
    """The second one: two columns."""
    return [NotOffered(pattern.strip("`"), reason) for pattern, reason in _table(columns=2)]


def _table(columns: int) -> list[list[str]]:
    """The cells of the rows of that table of DISAGREEMENTS.md that has so many columns."""
    lines = (HERE / "DISAGREEMENTS.md").read_text().splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| `")
    ]
    return [cells for cells in rows if len(cells) == columns]


def tensor(value: Any) -> Any:
    """A nested list or number as a tensor, int64 or float64; anything else as it is."""
    try:
        array = np.array(_numbers(value))
    except ValueError:
        return value
    return torch.from_numpy(array) if array.dtype.kind in "if" else value


def differences(
    case: Case,
    adapter: Callable[[Case], Result],
    left_out: Collection[str],
    overruled: Collection[str] = (),
) -> dict[str, str]:
    """What our code and the case do not agree on, by name, with a message each.

    Every output and gradient of the case is compared but for the names that match `left_out`.
    Where we overrule the case, numbers must not pass for equal because both are small.
    """
    result = adapter(case)
    expected, actual = flat(case.raw["outputs"]), flat(result.outputs)
    if (grads := dict(case.raw.get("grads") or {})) and not case.raw.get(
        "grads_implementation_defined"
    ):
        assert grads.pop("of") in {
            *("mean(losses)", "loss", "sum(output)"),
            *("sum(kl)", "mean(kl)"),
        }
        expected |= {f"grads/{name}": value for name, value in grads.items()}
        actual |= {f"grads/{name}": value for name, value in gradients(result, grads).items()}
    compared = {name: value for name, value in expected.items() if not matches(name, left_out)}
    assert compared, "nothing is compared"
    assert compared.keys() <= actual.keys(), f"no {compared.keys() - actual.keys()} of ours"
    rtol, atol = case.raw["tolerance"]["rtol"], case.raw["tolerance"]["atol"]
    messages = {
        name: _difference(actual[name], value, rtol, 0 if matches(name, overruled) else atol)
        for name, value in compared.items()
    }
    return {name: message for name, message in messages.items() if message}


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether any of the patterns is the name's."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def gradients(result: Result, names: Mapping[str, Any]) -> dict[str, Tensor]:
    """The gradient of the loss by each of the names, or its norm over several tensors."""

    def gradient(of: Tensor | tuple[Tensor, ...]) -> Tensor:
        several = isinstance(of, tuple)
        found = torch.autograd.grad(result.loss, of, retain_graph=True)
        return torch.cat([g.flatten() for g in found]).norm() if several else found[0]

    return {name: gradient(result.wrt[name]) for name in names}


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries in one, names joined by slashes."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = flat(value) if isinstance(value, Mapping) else {"": value}
        found |= {f"{name}/{key}".rstrip("/"): item for key, item in inner.items()}
    return found


def _difference(actual: Any, expected: Any, rtol: float, atol: float) -> str:
    """Why the two are not equal, or nothing."""
    try:
        torch.testing.assert_close(
            torch.as_tensor(actual).detach().double(),
            torch.as_tensor(tensor(expected)).double(),
            rtol=rtol,
            atol=atol,
            equal_nan=True,
        )
    except AssertionError as error:
        return str(error)
    return ""


def _numbers(value: Any) -> Any:
    """The strings that stand for non-finite numbers replaced by them."""
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return NONFINITE.get(value, value) if isinstance(value, str) else value
