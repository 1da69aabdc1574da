"""From a composed configuration to a trained policy: build every part, fit, say what came of it."""

import logging
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ProgressBar
from omegaconf import DictConfig, OmegaConf

from lit_align.callbacks import StepProgressBar
from lit_align.callbacks.stop_on_signal import leave_ranks_unwatched
from lit_align.cli.process import TERMINATED
from lit_align.errors import UserError
from lit_align.matmul import choose_matmul

_IN_A_CHECKPOINT = {"state_dict", "optimizer_states", "loops"}


def run(cfg: DictConfig) -> dict[str, Any]:
    """Train what the configuration describes.

    Returns:
        `metrics`: last value of everything logged; `value`: the optimized one, or None; `model`:
        folder of the final policy, or None.

    Raises:
        UserError: for whatever the user can mend.
    """
    quieten()
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise UserError(f"{missing[0]} has no default: set {missing[0]}=...")
    check_checkpoint(cfg.ckpt_path)
    settle(cfg)
    datamodule, module = build(cfg.data), build(cfg.module)
    check_kind(datamodule, module)
    trainer = build_trainer(cfg)
    if trainer.is_global_zero:
        record(cfg, trainer)
    fit(trainer, module, datamodule=datamodule, ckpt_path=cfg.ckpt_path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    model = Path(cfg.output_dir) / "model"
    if trainer.is_global_zero:
        tell_where(Path(cfg.output_dir))
    return {
        "metrics": metrics,
        "value": optimized(cfg.optimized_metric, metrics),
        "model": str(model) if model.is_dir() else None,
    }


def settle(cfg: DictConfig) -> None:
    """Set what holds for the whole process."""
    if cfg.num_threads is not None:
        torch.set_num_threads(whole("num_threads", cfg.num_threads, least=1))
    choose_matmul(cfg.cpu_matmul)
    L.seed_everything(whole("seed", cfg.seed, least=0), workers=True)


def whole(name: str, value: Any, *, least: int) -> int:
    """The value, if it is a whole number that torch and Lightning can take."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**32:
        return value
    raise UserError(f"{name} must be a whole number of at least {least}, not {value!r}")


def build(node: Any, **options: Any) -> Any:
    """The object a node describes; it gets plain lists and dicts, never Hydra's own."""
    return instantiate(node, _convert_="all", **options)


def check_kind(datamodule: Any, module: Any) -> None:
    """Raise before any data is read that is not what the module learns from."""
    given, wanted = getattr(datamodule, "rows", None), getattr(module, "rows", None)
    if given and wanted and given != wanted:
        raise UserError(
            f"{type(module).__name__} learns from {wanted}, and {type(datamodule).__name__} holds "
            f"{given}: choose another data=, or a loss= for {given}"
        )


def build_trainer(cfg: DictConfig) -> L.Trainer:
    """The Trainer with its callbacks and loggers; one that is null was switched off."""
    ends = cfg.trainer
    if ends.max_steps == -1 and ends.max_epochs is None and ends.max_time is None:
        ends.max_epochs = 1
    whole("trainer.accumulate_grad_batches", ends.accumulate_grad_batches, least=1)
    callbacks, loggers = (
        [build(node) for node in group.values() if node is not None]
        for group in (cfg.callbacks, cfg.logger)
    )
    if ends.enable_progress_bar and not any(isinstance(c, ProgressBar) for c in callbacks):
        callbacks.append(StepProgressBar())
    # As a partial: Hydra would make configuration nodes of the callbacks first.
    make = build(cfg.trainer, _partial_=True)
    try:
        trainer: L.Trainer = make(callbacks=callbacks, logger=loggers)
    except (TypeError, ValueError) as error:
        raise UserError(f"trainer: {error}") from error
    return trainer


def quieten() -> None:
    """Say each thing once, and only what a user can use."""
    # Hydra's handlers show Lightning's messages and write them to the run's log.
    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).handlers.clear()
    # Loading and saving take a moment; the bars of transformers outlast them on the screen.
    transformers.logging.disable_progress_bar()
    # An advertisement, and what torch 2.13 deprecates in Lightning 2.6.
    rank_zero = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    rank_zero.addFilter(lambda message: "litlogger" not in message.getMessage())
    warnings.filterwarnings("ignore", ".*LeafSpec.*")
    # A resumed run has a folder of its own, and its callbacks are those of its own settings.
    warnings.filterwarnings("ignore", "The dirpath has changed")
    warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")


def record(cfg: DictConfig, trainer: L.Trainer) -> None:
    """Keep the configuration as it was run: in the run folder and with the loggers."""
    folder = Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    for logger in trainer.loggers:
        logger.log_hyperparams(settings)


def fit(trainer: L.Trainer, module: L.LightningModule, **options: Any) -> None:
    """Train; whatever ends it early ends the ranks that Lightning started as well."""
    try:
        trainer.fit(module, weights_only=True, **options)
    except SystemExit as end:
        # Lightning makes an exit of Ctrl-C; of SIGTERM it makes a subclass, which would end well.
        if type(end) is SystemExit and trainer.interrupted:
            raise KeyboardInterrupt from None
        sys.exit(end.code or TERMINATED)
    except Exception:
        leave_ranks_unwatched()
        # Waiting for this one in a collective, they would add a traceback each.
        if kill := getattr(trainer.strategy.launcher, "kill", None):
            kill(signal.SIGKILL)
        raise


def check_checkpoint(path: str | None) -> None:
    """Raise before anything is loaded if there is nothing to resume from."""
    if path is None or (Path(path) / "meta.pt").is_file():  # of one that sharded ranks wrote
        return
    if not Path(path).is_file():
        raise UserError(
            f"ckpt_path: there is no checkpoint {path}; runs keep theirs in their folder's "
            "checkpoints/"
        )
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True).keys()
    # One kind of error for each way in which a file can be something else.
    except Exception as error:
        raise UserError(f"ckpt_path: {path} is damaged or no checkpoint") from error
    if not found >= _IN_A_CHECKPOINT:
        raise UserError(f"ckpt_path: {path} is not a checkpoint of a training run")


def optimized(name: str | None, metrics: dict[str, float]) -> float | None:
    """The metric a sweeper asks for."""
    if name is None:
        return None
    if name not in metrics:
        raise UserError(f"optimized_metric: no metric '{name}'; logged: {', '.join(metrics)}")
    return metrics[name]


def tell_where(folder: Path) -> None:
    """Name what a run leaves behind that people look for."""
    kept = {"run folder": folder, "model": folder / "model", "best model": folder / "model-best"}
    lines = [f"{what:12}{path}\n" for what, path in kept.items() if path.is_dir()]
    sys.stdout.write("".join(lines))
