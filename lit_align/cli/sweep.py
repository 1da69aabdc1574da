"""Sweeps: jobs of several processes run apart, and a table at the end."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, ListConfig

from lit_align.cli.outcome import FILE, Outcome
from lit_align.cli.process import RANK_VARIABLES
from lit_align.errors import UserError

INTERRUPTED = 130

# Overrides of Hydra itself that make a sweep or place its jobs: not for a job run apart.
_OF_SWEEPS = (
    "hydra.mode",
    "hydra.sweep",
    "hydra/sweeper",
    "hydra.launcher",
    "hydra/launcher",
    "hydra.run.dir",
    "hydra.output_subdir",
)


def processes(trainer: DictConfig) -> int:
    """How many processes a Trainer of this configuration will be."""
    devices = trainer.devices
    if isinstance(devices, ListConfig):
        return len(devices) * int(trainer.num_nodes)
    if str(devices) in {"auto", "-1"}:
        devices = 1 if trainer.accelerator == "cpu" else _gpus()
    try:
        return int(devices) * int(trainer.num_nodes)
    except (TypeError, ValueError):
        return 1  # the Trainer will say what is wrong with it


def _gpus() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def run_apart() -> Outcome:
    """Run the present job of a sweep as a command of its own.

    Lightning starts further ranks with the command line of the first. In a sweep that is the
    command line of the whole sweep: each rank would run a sweep of its own, with a search even
    over other values, and one failure would end them all.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a sweep starts the processes of its jobs itself: run it without torchrun")
    context = HydraConfig.get()
    result = Path(context.runtime.output_dir) / FILE
    result.unlink(missing_ok=True)
    environment = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
    command = [sys.executable, "-m", "lit_align", *job_arguments()]
    code = subprocess.run(command, env=environment, cwd=context.runtime.cwd, check=False).returncode
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    about: dict[str, Any] = {"job": context.job.num, "overrides": list(context.overrides.task)}
    unfinished = Outcome(**about, error=f"its process ended with exit code {code} and no result")
    outcome = Outcome.read(result) if result.exists() else unfinished
    error = outcome.error or (f"its process ended with exit code {code}" if code else None)
    outcome = replace(outcome, **about, error=error)
    outcome.write(result.parent)
    return outcome


def job_arguments() -> list[str]:
    """The command line that runs the present job of a sweep, alone and in its own folder."""
    context = HydraConfig.get()
    sources = {source.provider: source.path for source in context.runtime.config_sources}
    folders = {"--config-path": sources["main"], "--config-dir": sources.get("command-line")}
    flags = [f"{flag}={path.removeprefix('file://')}" for flag, path in folders.items() if path]
    of_hydra = [o for o in context.overrides.hydra if not o.lstrip("+~").startswith(_OF_SWEEPS)]
    folder = str(context.runtime.output_dir).replace("'", r"\'")
    return [
        *flags,
        f"--config-name={context.job.config_name}",
        *context.overrides.task,
        *of_hydra,
        "hydra.mode=RUN",
        f"hydra.run.dir='{folder}'",
        "hydra.output_subdir=null",
    ]


class SweepReport(Callback):
    """Shows how the jobs of a sweep ended; one that failed makes the command fail.

    What it knows it reads from the folders of the jobs, so it does not matter where they ran.

    Args:
        metrics: names of the columns, of those that were logged.
    """

    def __init__(self, metrics: Sequence[str]) -> None:
        self.metrics = list(metrics)
        self.started = time.time()

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        self.started = time.time()

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        outcomes = self.outcomes(Path(config.hydra.sweep.dir))
        self.show(outcomes)
        if failed := [o for o in outcomes if o.error]:
            lines = [f"job {o.job} ({varied(o, outcomes)}): {o.error}" for o in failed]
            count = f"error: {len(failed)} of {len(outcomes)} jobs failed"
            sys.exit("\n".join([count, *lines]))

    def outcomes(self, folder: Path) -> list[Outcome]:
        """What the jobs of this sweep left, by number; an older sweep in its folder is ignored."""
        files = [f for f in folder.rglob(FILE) if f.stat().st_mtime >= self.started]
        return sorted((Outcome.read(file) for file in files), key=lambda outcome: outcome.job)

    def show(self, outcomes: Sequence[Outcome]) -> None:
        """Print the table."""
        from rich.console import Console
        from rich.table import Column, Table

        metrics = [name for name in self.metrics if any(name in o.metrics for o in outcomes)]
        short = [name.removeprefix("val/") for name in metrics]
        table = Table("job", Column("run", overflow="fold"), "status", *short, title="sweep")
        for outcome in outcomes:
            values = [f"{outcome.metrics[m]:.4f}" if m in outcome.metrics else "" for m in metrics]
            status = "failed" if outcome.error else "completed"
            table.add_row(str(outcome.job), varied(outcome, outcomes), status, *values)
        Console().print(table)


def varied(outcome: Outcome, outcomes: Sequence[Outcome]) -> str:
    """The overrides of one job that not all jobs share."""
    return " ".join(o for o in outcome.overrides if any(o not in x.overrides for x in outcomes))
