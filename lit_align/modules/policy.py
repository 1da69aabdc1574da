"""What every alignment method shares: a policy that is loaded, sharded, stepped and saved."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from inspect import signature
from os import PathLike, fspath
from typing import Any, Protocol, get_args

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedTokenizerBase

from lit_align.errors import UserError
from lit_align.logprobs import Layout
from lit_align.modules.frozen import FrozenReference
from lit_align.modules.moving import MovingReference
from lit_align.modules.sharding import shard
from lit_align.modules.window import replica
from lit_align.policies import PolicyRecipe, has_adapter

Batch = Mapping[str, Tensor]
Place = str | PathLike[str]
Loadable = Place | PolicyRecipe | Mapping[str, Any]


class LossConfig(Protocol):
    """Which loss, as plain values that can be compared."""

    @property
    def reads_reference(self) -> bool:
        """Whether it compares the policy with a reference."""

    def as_dict(self) -> dict[str, Any]:
        """The values."""


class PolicyModule(L.LightningModule):
    """Holds a policy and trains it; what with is for the subclass to say.

    Args:
        policy: hub id, folder, GGUF file or "tiny"; or a recipe that says how to load one; or a
            loaded model, with an adapter of peft or without.
        loss: its config.
        tokenizer: of a loaded model that does not know where its own came from.
        reference: a second model to compare with; None: the policy before step 0.
        optimizer: from parameters to an optimizer; None: AdamW, learning rate 1e-6.
        scheduler: from an optimizer (and `total_steps`) to a scheduler, stepped once per
            optimizer step; None: constant.
        layout: how a batch goes through the model: "padded", "packed", "shared" (prompts that
            repeat run once) or "auto", the cheapest that the model allows. Of no effect on results.
    """

    policy: Any  # a model of transformers, or of peft around one
    # What a data module must give, by its own attribute of this name; one without it may be right.
    rows: str
    # What to run for the reference's log-probs; None where they are looked up.
    live_reference: FrozenReference | None = None

    def __init__(
        self,
        policy: Loadable | nn.Module,
        loss: LossConfig,
        *,
        tokenizer: PreTrainedTokenizerBase | None,
        reference: Loadable | None,
        optimizer: Callable[..., Optimizer] | None,
        scheduler: Callable[..., Any] | None,
        layout: Layout,
    ) -> None:
        super().__init__()
        if layout not in get_args(Layout):
            choices = ", ".join(get_args(Layout))
            raise UserError(f"unknown layout '{layout}': choose one of {choices}")
        self.layout = layout
        self.recipe = None if isinstance(policy, nn.Module) else _recipe(policy)
        if isinstance(policy, nn.Module):
            self.policy = policy
        self.loss = loss
        self.reference = None if reference is None else _recipe(reference)
        self.optimizer = optimizer or (lambda parameters: AdamW(parameters, lr=1e-6))
        self.scheduler = scheduler
        self._tokenizer = tokenizer
        self._seed: int | None = None
        # Only plain values: a checkpoint must load with weights_only=True.
        self._set_hparams(
            {
                "policy": None if self.recipe is None else asdict(self.recipe),
                "loss": loss.as_dict(),
                "reference": None if self.reference is None else asdict(self.reference),
            }
        )

    @property
    def needs_window(self) -> bool:
        """Whether loaders are to show each optimizer step as a whole before its first part."""
        return False

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The one given, else the recipe's, else the one that lies beside the loaded model."""
        if self._tokenizer is None:
            if self.recipe is None and not self.policy.name_or_path:
                raise UserError("this model does not say where it came from: pass tokenizer=...")
            recipe = self.recipe or PolicyRecipe(self.policy.name_or_path)
            self._tokenizer = recipe.tokenizer()
        return self._tokenizer

    def setup(self, stage: str) -> None:
        """Refuse, before anything is loaded, data of another kind than this module learns from."""
        # Half precision is for what a model computes: Lightning would also round the counts and
        # log-probs that come with a batch. What is computed with them says its precision itself.
        self.trainer.precision_plugin.convert_input = lambda data: data  # type: ignore[method-assign]
        data = getattr(self.trainer, "datamodule", None)
        given = getattr(data, "rows", self.rows)
        if given != self.rows:
            raise UserError(
                f"{type(self).__name__} learns from {self.rows}, and {type(data).__name__} holds "
                f"{given}: choose other data, or a loss and module for {given}"
            )

    def configure_model(self) -> None:
        """Load the policy, let the subclass look at it before anything moved it, and shard it.

        Lightning calls this before every fit and validation; the reference stays the policy as it
        stood the first time, but for one that moves (`ReferenceRefresh`).
        """
        if not hasattr(self, "policy"):
            assert self.recipe is not None
            self.policy = self.recipe.model()
        self.policy.train()
        self.strict_loading = not has_adapter(self.policy)
        self.note_reference()
        if self.device_mesh is not None:
            shard(self.policy, self.device_mesh)

    def note_reference(self) -> None:
        """Keep what the loss needs of the policy before the first step; by default nothing."""

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.policy.parameters() if p.requires_grad]
        optimizer = _built("optimizer", self.optimizer, trainable)
        if self.scheduler is None:
            return optimizer
        # Our schedules end with training; one of torch's or the user's own may not ask for it.
        length = {"total_steps": self.trainer.estimated_stepping_batches}
        asked = length if "total_steps" in signature(self.scheduler).parameters else {}
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": _built("scheduler", self.scheduler, optimizer, **asked),
                "interval": "step",
            },
        }

    @property
    def run_seed(self) -> int:
        """What all randomness of this run is derived from; a resumed run has the first one's."""
        if self._seed is None:
            self._seed = torch.initial_seed() % 2**32
        return self._seed

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed each step by its number.

        Lightning's checkpoints hold no random state; so what dropout draws depends on the step
        and the rank alone, and a resumed run draws what an uninterrupted one would.
        """
        self.seed_step()

    def seed_step(self, ahead: int = 0) -> None:
        """Set the random state to that of the present micro-batch, or of one so many further on."""
        rank, _ = replica(self.trainer)
        step = self.trainer.fit_loop.epoch_loop.total_batch_idx + ahead
        seed = ((self.run_seed << 24) + step << 7) + rank & 2**63 - 1
        if self.device.type == "cpu":
            # The same, without what torch prepares for devices that are not there: 0.3 ms a step.
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def lot(self, count: int) -> Tensor:
        """Random numbers from 0 to 1, (count,), the same on all ranks and all through a step."""
        seed = (self.run_seed << 24) + self.trainer.global_step & 2**63 - 1
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(count, generator=generator, dtype=torch.float32).to(self.device)

    def is_logging_step(self) -> bool:
        """Whether Lightning's loggers listen at the optimizer step that is about to be made.

        They do at the last one as well, and would be told the numbers of an earlier one.
        """
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        step = self.trainer.global_step + 1
        return bool(every) and (step % every == 0 or step == self.trainer.max_steps)

    def log_step(self, metrics: Mapping[str, Tensor | float], *, on_bar: str) -> None:
        """Log the metrics of a step to be made: only of some, for each of them takes 0.3 ms.

        Args:
            metrics: by name without `train/`, () each, the same on all ranks.
            on_bar: the one that the progress bar shows, if it is there.
        """
        for name, value in metrics.items():
            self.log(f"train/{name}", value, prog_bar=name == on_bar)

    def refuse_a_loss_that_is_no_number(self, loss: Tensor) -> None:
        """Stop a run that has come apart."""
        if not loss.isfinite():
            raise UserError(
                f"the training loss is {loss.item()} at step {self.trainer.global_step}, "
                f"with a learning rate of {self.trainer.optimizers[0].param_groups[0]['lr']:g} and "
                f"precision {self.trainer.precision}: lower optimizer.lr, or train in 32-true or "
                "bf16-mixed"
            )

    def on_train_start(self) -> None:
        """Tell ModelCheckpoints that the step a run is resumed from has been saved.

        They do not know, and would save it again in the middle of the next step.
        """
        self._refuse_a_lost_reference()
        if self.trainer.ckpt_path is None:
            return
        for keeper in self.trainer.checkpoint_callbacks:
            if isinstance(keeper, ModelCheckpoint):
                keeper._last_global_step_saved = self.trainer.global_step

    def _refuse_a_lost_reference(self) -> None:
        if self.live_reference is not None and self.live_reference.is_lost(self.policy):
            raise UserError(
                "the reference is the policy as it was before its first step, and an earlier run "
                "with ReferenceRefresh has trained it without keeping that: make a new module "
                "from what this one was loaded from, or keep the callback"
            )

    def _is_within_a_step(self) -> bool:
        """Whether gradients have been accumulated that no checkpoint holds."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        done = progress.current.ready % self.trainer.accumulate_grad_batches
        return bool(done) and not progress.is_last_batch

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["step_seed"] = self._seed
        checkpoint["within_a_step"] = self._is_within_a_step()
        if checkpoint["within_a_step"]:
            rank_zero_warn(
                "this checkpoint is written in the middle of an optimizer step and cannot be "
                "resumed from: validate and save after whole steps (trainer.val_check_interval "
                f"counts micro-batches, {self.trainer.accumulate_grad_batches} to a step)"
            )
        if has_adapter(self.policy):
            # The base model is on disk already; a LoRA checkpoint holds what training changed.
            trained = {
                f"policy.{name}" for name, p in self.policy.named_parameters() if p.requires_grad
            }
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {k: v for k, v in weights.items() if k in trained}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._seed = checkpoint.get("step_seed")
        if self._trainer is not None and checkpoint.get("within_a_step"):
            raise UserError(
                "the checkpoint was written in the middle of an optimizer step, and holds nothing "
                "of the gradients accumulated so far: take another"
            )
        saved = checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY]["loss"]
        if self._trainer is not None:
            refuse_other_settings("loss", saved, self.loss.as_dict())
            self._refuse_a_reference_that_stays(checkpoint.get("reference_moved_by"))

    def _refuse_a_reference_that_stays(self, moved_by: str | None) -> None:
        """If the run that is to go on had one that moved; to be looked at, it does without."""
        goes_on = self.trainer.state.fn == TrainerFn.FITTING
        if moved_by and goes_on and not isinstance(self.live_reference, MovingReference):
            raise UserError(
                "the checkpoint was trained against a reference that moved, and this run has the "
                f"one it began with: add the callback {moved_by}"
            )


def refuse_other_settings(what: str, saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse to go on with a run in another way.

    Args:
        what: is set, as a user calls it.
        saved: names and values, which may be nested, of the run that is to go on.
        given: the same of this run.

    Raises:
        UserError: if they differ; it names each difference.
    """
    was, is_now = _flat(saved), _flat(given)
    changes = ", ".join(
        f"{name} {was.get(name)!r} is now {is_now.get(name)!r}"
        for name in {**was, **is_now}
        if was.get(name) != is_now.get(name)
    )
    if changes:
        raise UserError(
            f"the checkpoint was trained with another {what} ({changes}): repeat the settings of "
            "the run that is to go on"
        )


def _flat(values: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Nested values by the names that set them, such as `terms.dpo.beta`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping)
        found |= _flat(value, f"{within}{name}.") if inner else {f"{within}{name}": value}
    return found


def _built(what: str, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a partial of the user's makes, or one message of why it makes nothing."""
    try:
        return make(*arguments, **options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the {what} cannot be built: {error}") from error


def _recipe(policy: Loadable) -> PolicyRecipe:
    if isinstance(policy, PolicyRecipe):
        return policy
    if isinstance(policy, str | PathLike):
        return PolicyRecipe(fspath(policy))
    return PolicyRecipe(**policy)
