"""The verb `train`: Hydra composes, `run` builds and fits, the outcome is told and kept."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lit_align.cli.aliases import with_our_names
from lit_align.cli.conf import conf_dir
from lit_align.cli.errors import explain, headline, hydra_raises, mistake, restore_environment
from lit_align.cli.outcome import Outcome
from lit_align.cli.process import TERMINATED, is_first_rank, left_as_found, wait_for_first_rank
from lit_align.cli.sweep import processes, run_apart

log = logging.getLogger(__name__)


def main() -> None:
    """Train as `sys.argv` says; ends the process with 1 after an error, 130 after Ctrl-C."""
    hydra_raises()
    # In place: further ranks are started with what stands there.
    sys.argv[1:] = with_our_names(sys.argv[1:])
    try:
        job()
    except KeyboardInterrupt as end:
        if is_first_rank():
            sys.stderr.write(f"interrupted{end}\n")
        sys.exit(130)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        sys.exit(explain(error))


@contextmanager
def stopped_by_signal(folder: Path) -> Iterator[None]:
    """Say of a run that somebody ends where it can be taken up again."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(how_to_go_on(folder)) from None
    except SystemExit as end:
        if end.code == TERMINATED and is_first_rank():
            sys.stderr.write(f"terminated{how_to_go_on(folder)}\n")
        raise


def how_to_go_on(folder: Path) -> str:
    """Where an interrupted run can be taken up again."""
    last = folder / "checkpoints" / "last.ckpt"
    if not last.exists():
        return "; no checkpoint had been written (callbacks.checkpoint.every_n_train_steps)"
    return f"; go on with the same settings and ckpt_path={last}"


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")
def job(cfg: DictConfig) -> float | None:
    """One run; what a sweeper gets is the optimized metric, or None."""
    restore_environment()
    sweeping = HydraConfig.get().mode == RunMode.MULTIRUN
    apart = sweeping and processes(cfg.trainer) > 1
    outcome = run_apart() if apart else attempt(cfg)
    if outcome.error is None:
        return outcome.value
    if not sweeping:
        sys.exit(1)
    # The other jobs go on; SweepReport ends the process with 1 after the last of them.
    log.error("job %d (%s) failed: %s", outcome.job, " ".join(outcome.overrides), outcome.error)
    return None


def attempt(cfg: DictConfig) -> Outcome:
    """Run in this process; an error is told and becomes part of the outcome."""
    context = HydraConfig.get()
    folder = Path(context.runtime.output_dir)
    sweeping = context.mode == RunMode.MULTIRUN
    about: dict[str, Any] = {
        "job": context.job.num if sweeping else 0,
        "overrides": list(context.overrides.task),
    }
    cfg.output_dir = cfg.output_dir or str(folder)
    with left_as_found():
        try:
            from lit_align.cli.run import run

            with stopped_by_signal(folder):
                outcome = Outcome(**about, **run(cfg))
        except Exception as error:
            # Whatever it is: the other jobs of a sweep go on.
            wait_for_first_rank()
            if not sweeping or mistake(error) is None:
                sys.stderr.write(explain(error) + "\n")
            outcome = Outcome(**about, error=headline(error))
    if is_first_rank():
        outcome.write(folder)
    return outcome
