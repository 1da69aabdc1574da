"""What training was good for: the validation metrics before the first step and at the end."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console
from rich.table import Table

Metrics = dict[str, float]


class BeforeAfter(L.Callback):
    """Prints a table of validation metrics before and after training.

    "Before" is Lightning's sanity check, if it runs over the whole validation set:
    `Trainer(num_sanity_val_steps=-1)`. A resumed run takes it from the checkpoint.

    Args:
        metrics: which ones, in this order; None: all that are logged under `val/`.
        folder: where to write them too, as `before_after.json`; None: nowhere.
    """

    def __init__(
        self,
        metrics: Sequence[str] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.metrics = metrics
        self.folder = folder
        self.before: Metrics = {}
        self.after: Metrics = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == TrainerFn.FITTING:
            self.before, self.after = {}, {}

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before, self.after = state_dict["before"], state_dict["after"]

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # A few batches would be another quantity than the whole set at the end.
        if trainer.num_sanity_val_steps == float("inf"):
            self.before = self._of_interest(trainer.callback_metrics)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.after = self._of_interest(trainer.callback_metrics)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero or not self.after:
            return
        Console().print(self.table())
        if self.folder is not None:
            path = Path(self.folder) / "before_after.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}.{os.getpid()}")
            unfinished.write_text(json.dumps(self.state_dict(), indent=1))
            unfinished.replace(path)

    def table(self) -> Table:
        """One line per metric: before, after, change."""
        table = Table("metric", title="validation, before and after training")
        for column in ("before", "after", "change"):
            table.add_column(column, justify="right")
        for name, after in self.after.items():
            before = self.before.get(name, math.nan)
            row = (f"{before:z.4f}", f"{after:z.4f}", f"{after - before:+z.4f}")
            table.add_row(name.removeprefix("val/"), *(x.replace("nan", "") for x in row))
        return table

    def _of_interest(self, logged: Mapping[str, Any]) -> Metrics:
        """The chosen metrics that were logged, as plain numbers."""
        names = self.metrics or sorted(name for name in logged if name.startswith("val/"))
        return {name: float(logged[name]) for name in names if name in logged}
