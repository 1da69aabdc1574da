"""What became of one run: told at its end, kept in `result.json` for the sweep it is part of."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "result.json"


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        job: its number in the sweep, 0 outside of one.
        overrides: what was set for it.
        metrics: last value of everything that was logged.
        value: the optimized metric, if there is one.
        error: why it failed, in a few lines; None for a run that finished.
        model: folder of the final policy, if one was written.
    """

    job: int
    overrides: list[str]
    metrics: dict[str, float] = field(default_factory=dict)
    value: float | None = None
    error: str | None = None
    model: str | None = None

    def write(self, folder: Path) -> None:
        """Leave it in the run's folder, for whoever looks later."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, file: Path) -> "Outcome":
        """The outcome that a run left."""
        return cls(**json.loads(file.read_text()))
