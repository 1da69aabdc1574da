"""Preference optimisation as a LightningModule.

Everything that makes one preference loss differ from another is in its config (`DPOConfig`); here
are only the forward pass, the normalisation over the optimizer-step window and the metrics.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from lit_align.errors import UserError
from lit_align.logprobs import Alignment, Layout, response_logprobs
from lit_align.losses import DPOConfig, GRPOConfig, PairLoss, TensorCache, compute_loss
from lit_align.modules.metrics import RunningMeans, gradient_norm
from lit_align.modules.policy import Batch, Loadable, PolicyModule
from lit_align.modules.window import replica, window_mean
from lit_align.ops import IGNORE_INDEX, completion_lengths
from lit_align.policies import policy_fingerprint

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


class DPOModule(PolicyModule):
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
        layout: how a batch goes through the model: "padded", "packed", "shared" (prompts that
            repeat run once) or "auto", the cheapest that the model allows. Of no effect on results.
    """

    rows = "pairs"
    loss: DPOConfig
    reference_fingerprint: str

    def __init__(
        self,
        policy: Loadable | nn.Module,
        loss: str | DPOConfig | Mapping[str, Any] = "dpo",
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reference: Loadable | None = None,
        optimizer: Callable[..., Optimizer] | None = None,
        scheduler: Callable[..., Any] | None = None,
        layout: Layout = "auto",
    ) -> None:
        super().__init__(
            policy,
            _config(loss),
            tokenizer=tokenizer,
            reference=reference,
            optimizer=optimizer,
            scheduler=scheduler,
            layout=layout,
        )
        self.reference_cache: TensorCache | None = None
        self.train_means = RunningMeans(*PAIR_METRICS)
        self.val_means = RunningMeans(*PAIR_METRICS)

    def setup(self, stage: str) -> None:
        """Refuse, before anything is loaded, to give a loss a part of what it has to see whole."""
        super().setup(stage)
        parts = self.trainer.accumulate_grad_batches * replica(self.trainer)[1]
        if self.loss.variant.whole_window and parts > 1:
            raise UserError(
                f"loss '{self.loss.loss_type}' ranks all pairs of a step, which is cut in {parts} "
                "parts: train on one rank with trainer.accumulate_grad_batches=1, and raise "
                "data.batch_size"
            )

    def note_reference(self) -> None:
        """The fingerprint of the policy before the first step: what the cache is a cache of."""
        if self.loss.variant.reads_reference and not hasattr(self, "reference_fingerprint"):
            self.reference_fingerprint = policy_fingerprint(self.policy)

    def pair_logps(self, batch: Batch) -> PairLogps:
        """Log-probs of both responses under the policy.

        Both halves share one forward pass: FSDP then gathers the weights once, not twice.
        """
        input_ids, attention_mask, labels = stacked_pairs(batch)
        scored = response_logprobs(
            self.policy,
            input_ids,
            attention_mask,
            labels,
            alignment=self._alignment(),
            layout=self.layout,
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

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if not self.is_logging_step():
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
        self.refuse_a_loss_that_is_no_number(means["loss"])
        return means

    def on_validation_epoch_end(self) -> None:
        means = self.val_means.compute()
        self.val_means.reset()
        # They are those of all ranks already; Lightning warns of what it did not reduce itself.
        self.log_dict({f"val/{name}": value for name, value in means.items()}, sync_dist=True)


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


def _config(loss: str | DPOConfig | Mapping[str, Any]) -> DPOConfig:
    if isinstance(loss, GRPOConfig):
        raise UserError(
            f"'{loss.loss_fn}' is a loss of completions: choose a loss of pairs, such as dpo, or "
            "GRPOModule (module=grpo)"
        )
    if isinstance(loss, DPOConfig):
        return loss
    return DPOConfig(loss) if isinstance(loss, str) else DPOConfig(**loss)
