"""Preference optimisation as a LightningModule.

Everything that makes one preference loss differ from another is in its config (`DPOConfig`); here
are only the forward pass, the normalisation over the optimizer-step window and the metrics.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from inspect import signature
from os import PathLike, fspath
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedTokenizerBase

from lit_align.errors import UserError
from lit_align.logprobs import Alignment, response_logprobs
from lit_align.losses import DPOConfig, PairLoss, TensorCache, compute_loss
from lit_align.modules.metrics import RunningMeans, gradient_norm
from lit_align.modules.sharding import shard
from lit_align.modules.window import replica, window_mean
from lit_align.ops import IGNORE_INDEX, completion_lengths
from lit_align.policies import PolicyRecipe, has_adapter, policy_fingerprint

Batch = Mapping[str, Tensor]
Place = str | PathLike[str]

PAIR_METRICS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "ranking_accuracies",
)


class PairLogps(NamedTuple):
    """Log-probs of both responses of each pair, (B,), nats, summed over response tokens."""

    chosen: Tensor
    rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    chosen_alignment: Tensor | None
    rejected_alignment: Tensor | None


class DPOModule(L.LightningModule):
    """Trains a policy on preference pairs with any preference loss.

    Losses that compare with a reference need the `ReferenceCache` callback in the Trainer.

    Args:
        policy: hub id, folder, GGUF file or "tiny"; or a recipe that says how to load one; or a
            loaded model, with an adapter of peft or without.
        loss: name of a loss with its defaults, or its config.
        tokenizer: of a loaded model that does not know where its own came from.
        reference: recipe of a second model to compare with; None: the policy before step 0.
        optimizer: from parameters to an optimizer; None: AdamW, learning rate 1e-6.
        scheduler: from an optimizer (and `total_steps`) to a scheduler, stepped once per
            optimizer step; None: constant.
    """

    policy: Any  # a model of transformers, or of peft around one
    reference_fingerprint: str

    def __init__(
        self,
        policy: Place | PolicyRecipe | Mapping[str, Any] | nn.Module,
        loss: str | DPOConfig | Mapping[str, Any] = "dpo",
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reference: Place | PolicyRecipe | Mapping[str, Any] | None = None,
        optimizer: Callable[..., Optimizer] | None = None,
        scheduler: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.recipe = None if isinstance(policy, nn.Module) else _recipe(policy)
        if isinstance(policy, nn.Module):
            self.policy = policy
        self.reference = None if reference is None else _recipe(reference)
        self.loss = _config(loss)
        self.optimizer = optimizer or (lambda parameters: AdamW(parameters, lr=1e-6))
        self.scheduler = scheduler
        self.reference_cache: TensorCache | None = None
        self._tokenizer = tokenizer
        self._seed: int | None = None
        self.train_means = RunningMeans(*PAIR_METRICS)
        self.val_means = RunningMeans(*PAIR_METRICS)
        # Only plain values: a checkpoint must load with weights_only=True.
        self._set_hparams(
            {
                "policy": None if self.recipe is None else asdict(self.recipe),
                "loss": self.loss.as_dict(),
                "reference": None if self.reference is None else asdict(self.reference),
            }
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The one given, else the recipe's, else the one that lies beside the loaded model."""
        if self._tokenizer is None:
            if self.recipe is None and not self.policy.name_or_path:
                raise UserError("this model does not say where it came from: pass tokenizer=...")
            recipe = self.recipe or PolicyRecipe(self.policy.name_or_path)
            self._tokenizer = recipe.tokenizer()
        return self._tokenizer

    def configure_model(self) -> None:
        """Load the policy, note what it was before anything moved it, and shard it.

        Lightning calls this before every fit and validation; the reference stays the policy as it
        stood the first time.
        """
        if not hasattr(self, "policy"):
            assert self.recipe is not None
            self.policy = self.recipe.model()
        self.policy.train()
        self.strict_loading = not has_adapter(self.policy)
        if self.loss.variant.reads_reference and not hasattr(self, "reference_fingerprint"):
            self.reference_fingerprint = policy_fingerprint(self.policy)
        if self.device_mesh is not None:
            shard(self.policy, self.device_mesh)

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

    def pair_logps(self, batch: Batch) -> PairLogps:
        """Log-probs of both responses under the policy.

        Both halves share one forward pass: FSDP then gathers the weights once, not twice.
        """
        input_ids, attention_mask, labels = stacked_pairs(batch)
        scored = response_logprobs(
            self.policy, input_ids, attention_mask, labels, alignment=self._alignment()
        )
        terms = (None, None) if scored.alignment is None else scored.alignment.sum(-1).chunk(2)
        return PairLogps(
            *scored.logprobs.sum(-1).chunk(2), *completion_lengths(labels).chunk(2), *terms
        )

    def _alignment(self) -> Alignment | None:
        """Which alignment terms the loss wants; the authors of WPO recommend the sampled ones."""
        if not self.loss.variant.reads_alignment or self.loss.alignment == "none":
            return None
        wanted: Alignment = self.loss.alignment or "sampled"
        return wanted

    def pair_loss(self, batch: Batch, logps: PairLogps) -> PairLoss:
        """Losses and rewards per pair, through the loss that the config names."""
        chosen, rejected = logps.chosen, logps.rejected
        if self.loss.variant.average_logps:
            chosen = chosen / logps.chosen_lengths.clamp(min=1)
            rejected = rejected / logps.rejected_lengths.clamp(min=1)
        if logps.chosen_alignment is not None and logps.rejected_alignment is not None:
            batch = {
                **batch,
                "chosen_alignment_logps": logps.chosen_alignment,
                "rejected_alignment_logps": logps.rejected_alignment,
            }
        return compute_loss(self.loss, batch, chosen, rejected, self.reference_cache)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logps = self.pair_logps(batch)
        pair = self.pair_loss(batch, logps)
        mask = pair_mask(batch)
        self.train_means.update(pair_metrics(pair, logps), mask)
        return window_mean(pair.losses, mask, batch.get("window_pairs"), self.trainer)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logps = self.pair_logps(batch)
        self.val_means.update(pair_metrics(self.pair_loss(batch, logps), logps), pair_mask(batch))

    def on_train_start(self) -> None:
        if self._seed is None:
            self._seed = torch.initial_seed() % 2**32

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed each step by its number.

        Lightning's checkpoints hold no random state; so what dropout draws depends on the step
        and the rank alone, and a resumed run draws what an uninterrupted one would.
        """
        rank, _ = replica(self.trainer)
        step = self.trainer.fit_loop.epoch_loop.total_batch_idx
        assert self._seed is not None
        torch.manual_seed(((self._seed << 24) + step << 7) + rank & 2**63 - 1)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not every or (self.trainer.global_step + 1) % every:
            return
        means = self._train_means()
        self.log("train/loss", means.pop("loss"), prog_bar=True)
        self.log_dict({f"train/{name}": value for name, value in means.items()})
        self.log("train/grad_norm", gradient_norm(self.policy.parameters()))

    def on_train_epoch_end(self) -> None:
        if self.train_means.update_called:
            self._train_means()

    def _train_means(self) -> dict[str, Tensor]:
        """Means over the steps since the last ones, which must be numbers."""
        means = self.train_means.compute()
        self.train_means.reset()
        if not means["loss"].isfinite():
            raise UserError(
                f"the training loss is {means['loss'].item()} at step {self.trainer.global_step}, "
                f"with a learning rate of {self.trainer.optimizers[0].param_groups[0]['lr']:g} and "
                f"precision {self.trainer.precision}: lower optimizer.lr, or train in 32-true or "
                "bf16-mixed"
            )
        return means

    def on_validation_epoch_end(self) -> None:
        means = self.val_means.compute()
        self.val_means.reset()
        # They are those of all ranks already; Lightning warns of what it did not reduce itself.
        self.log_dict({f"val/{name}": value for name, value in means.items()}, sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["step_seed"] = self._seed
        if has_adapter(self.policy):
            # The base model is on disk already; a LoRA checkpoint holds what training changed.
            trained = {
                f"policy.{name}" for name, p in self.policy.named_parameters() if p.requires_grad
            }
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {k: v for k, v in weights.items() if k in trained}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._seed = checkpoint.get("step_seed")
        saved = checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY]["loss"]
        if self._trainer is not None and saved != self.loss.as_dict():
            raise UserError(
                f"the checkpoint was trained with {DPOConfig(**saved)}, and this run has "
                f"{self.loss}: repeat the settings of the run that is to go on"
            )


def _built(what: str, make: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a partial of the user's makes, or one message of why it makes nothing."""
    try:
        return make(*arguments, **options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the {what} cannot be built: {error}") from error


def stacked_pairs(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen above rejected, padded to one width: input_ids, attention_mask, labels, (2B, T)."""
    width = max(batch["chosen_labels"].shape[1], batch["rejected_labels"].shape[1])

    def stacked(name: str, filler: int) -> Tensor:
        halves = (batch[f"chosen_{name}"], batch[f"rejected_{name}"])
        return torch.cat([F.pad(half, (0, width - half.shape[1]), value=filler) for half in halves])

    # Masked positions are read by nothing, so any valid id pads.
    return stacked("input_ids", 0), stacked("attention_mask", 0), stacked("labels", IGNORE_INDEX)


def pair_mask(batch: Batch) -> Tensor:
    """Which rows are real pairs, (B,) bool; a loader of the user's own has only real ones."""
    if "pair_mask" in batch:
        return batch["pair_mask"]
    return torch.ones_like(batch["chosen_labels"][:, 0], dtype=torch.bool)


def pair_metrics(pair: PairLoss, logps: PairLogps) -> dict[str, Tensor]:
    """What is logged of each pair, (B,) each.

    `rewards/*` are the rewards inside the loss; `logps/*` are sums over the response, in nats;
    `ranking_accuracies` is the share of pairs whose chosen response the policy itself finds
    likelier per token (Chen et al. 2024, arXiv:2405.19534): unlike DPO's rewards, it has a meaning
    before the first step as well.
    """
    margins = pair.chosen_rewards - pair.rejected_rewards
    chosen_mean = logps.chosen / logps.chosen_lengths.clamp(min=1)
    rejected_mean = logps.rejected / logps.rejected_lengths.clamp(min=1)
    return {
        "loss": pair.losses,
        "rewards/chosen": pair.chosen_rewards,
        "rewards/rejected": pair.rejected_rewards,
        "rewards/accuracies": margins > 0,
        "rewards/margins": margins,
        "logps/chosen": logps.chosen,
        "logps/rejected": logps.rejected,
        "ranking_accuracies": chosen_mean > rejected_mean,
    }


def _recipe(policy: Place | PolicyRecipe | Mapping[str, Any]) -> PolicyRecipe:
    if isinstance(policy, PolicyRecipe):
        return policy
    if isinstance(policy, str | PathLike):
        return PolicyRecipe(fspath(policy))
    return PolicyRecipe(**policy)


def _config(loss: str | DPOConfig | Mapping[str, Any]) -> DPOConfig:
    if isinstance(loss, DPOConfig):
        return loss
    return DPOConfig(loss) if isinstance(loss, str) else DPOConfig(**loss)
