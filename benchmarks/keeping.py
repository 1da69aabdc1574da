"""Rows kept in a file as they are measured, so that a run that was ended goes on where it was."""

import json
from pathlib import Path

from paired import Spread
from setting import Check, Found


def kept(path: Path | None) -> dict[str, Found]:
    """The rows in the file, by their names; none without one."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text())
    return {
        name: Found(
            {base: Spread(*number) for base, number in row["numbers"].items()},
            [Check(*check) for check in row["checks"]],
            row["details"],
        )
        for name, row in rows.items()
    }


def keep(path: Path | None, found: dict[str, Found]) -> None:
    """Write all rows, if there is a file."""
    if path is not None:
        # Named tuples become lists, in the order of their fields.
        path.write_text(json.dumps({name: vars(row) for name, row in found.items()}, indent=1))
