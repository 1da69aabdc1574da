"""Preference optimisation as a LightningModule.

Everything that makes one preference loss differ from another is in its config (`DPOConfig`, or
`CombinedConfig` for a sum of several); here are only the normalisation over the optimizer-step
window and the metrics.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from lit_align.errors import UserError
from lit_align.logprobs import Layout
from lit_align.losses import (
    GRPOConfig,
    PairConfig,
    PairLoss,
    UnpairedConfig,
    check_columns,
    compute_loss,
    of_term,
    pair_config,
    remark,
    weighted_sum,
)
from lit_align.modules.comparing import ComparingModule
from lit_align.modules.metrics import Sums
from lit_align.modules.pair_logps import PairLogps, pair_logps
from lit_align.modules.pair_metrics import PAIR_SUMS, pair_means, pair_sums
from lit_align.modules.policy import Batch, Loadable
from lit_align.modules.running import RunningNumbers
from lit_align.modules.whole_window import Rows, WholeWindow, Windows
from lit_align.modules.window import window_mean, with_gradient_of


class DPOModule(ComparingModule):
    """Trains a policy on preference pairs with any preference loss.

    Losses that compare with a reference need the `ReferenceCache` callback in the Trainer, or
    `ReferenceRefresh`.

    Args:
        policy: hub id, folder, GGUF file or "tiny"; or a recipe that says how to load one; or a
            loaded model, with an adapter of peft or without.
        loss: name of a loss, or of a sum of losses, with its defaults; or its config.
        tokenizer: of a loaded model that does not know where its own came from.
        reference: recipe of a second model to compare with; None: the policy before step 0.
        optimizer: from parameters to an optimizer; None: AdamW, learning rate 1e-6.
        scheduler: from an optimizer (and `total_steps`) to a scheduler, stepped once per
            optimizer step; None: constant.
        layout: how a batch goes through the model: "padded", "packed", "shared" (prompts that
            repeat run once) or "auto", the cheapest that the model allows. Of no effect on results.
    """

    rows = "pairs"
    sides = ("chosen", "rejected")
    loss: PairConfig

    def __init__(
        self,
        policy: Loadable | nn.Module,
        loss: str | PairConfig | Mapping[str, Any] = "dpo",
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
        self.windows = Windows()
        self.running = RunningNumbers({n: term.config for n, term in self.loss.terms.items()})
        self.train_sums = Sums(*PAIR_SUMS)
        self.val_sums = Sums(*PAIR_SUMS)
        self._columns: frozenset[str] = frozenset()

    def setup(self, stage: str) -> None:
        """Refuse, before anything is loaded, data that this loss cannot learn from."""
        super().setup(stage)
        self._check_columns()

    def _check_columns(self) -> None:
        """Refuse data that says of its pairs what the loss cannot honour."""
        data = getattr(self.trainer, "datamodule", None)
        parts = getattr(data, "pair_columns", {}).items()
        for part, columns in parts:
            check_columns(self.loss, columns, part)
        for said in filter(None, (remark(self.loss, columns, part) for part, columns in parts)):
            rank_zero_info(said)
            break

    @property
    def needs_window(self) -> bool:
        """Whether the loss compares the pairs of an optimizer step with each other."""
        return self.loss.whole_window

    @property
    def rewards_are_relative(self) -> bool:
        first = next(iter(self.loss.terms.values()))
        return first.config.reads_reference

    @property
    def reads_heads(self) -> bool:
        return self.loss.reads_heads

    def pair_logps(
        self, batch: Batch, model: nn.Module | None = None, *, statistics: bool = False
    ) -> PairLogps:
        """Log-probs of both responses under the policy, or under another model.

        Args:
            batch: of pairs.
            model: None: the policy.
            statistics: whether to say also what is only logged.
        """
        model = self.policy if model is None else model
        return pair_logps(model, batch, self.loss, self.layout, statistics=statistics)

    def response_logps(self, batch: Batch, model: nn.Module | None = None) -> PairLogps:
        return self.pair_logps(batch, model)

    def response_loss(self, batch: Batch, logps: PairLogps) -> PairLoss:
        return self.pair_loss(batch, logps)

    def pair_losses(self, batch: Batch, logps: PairLogps) -> dict[str, PairLoss]:
        """Losses and rewards per pair of every term of the loss, unweighted, by its name."""
        reference = self.reference_rows(batch) if self.loss.reads_reference else {}
        sums = logps.sums("policy") | reference
        if batch.keys() != self._columns:
            check_columns(self.loss, batch.keys(), "the batch")
            self._columns = frozenset(batch)
        given = {**batch, **logps.tensors(), **self._draws(logps)}
        found = {}
        for name, (_, config) in self.loss.terms.items():
            read = logps.per_token(sums) if config.average_logps else sums
            chosen, rejected = (read[f"policy_{side}_logps"] for side in ("chosen", "rejected"))
            given_term = of_term(config.variant, given | read | self.running[name])
            found[name] = compute_loss(config, given_term, chosen, rejected)
        return found

    def _draws(self, logps: PairLogps) -> dict[str, Tensor]:
        """Random numbers, one for each pair, if a term decides by lot."""
        decides = any("draws" in term.config.variant.tensors for term in self.loss.terms.values())
        return {"draws": self.lot(len(logps.chosen))} if decides else {}

    def pair_loss(self, batch: Batch, logps: PairLogps) -> PairLoss:
        """The weighted sum of the terms; rewards are those of the first."""
        return weighted_sum(self.loss, self.pair_losses(batch, logps))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        given, logps, own = self._compared(batch, self.windows)
        found = self.pair_losses(given, logps)
        self.running.observe(found, own)
        pair = weighted_sum(self.loss, found)
        self.train_sums.update_rows(pair_sums(pair, logps), own)
        pairs = batch.get("window_pairs")
        share = window_mean(pair.losses, own, pairs, self.trainer)
        if not self.needs_window:
            return share
        whole = window_mean(pair.losses, torch.ones_like(own), pairs, self.trainer)
        return with_gradient_of(share, whole)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """A loss that compares pairs with each other compares those of the batch."""
        given, logps, own = self._compared(batch, None)
        self.val_sums.update_rows(pair_sums(self.pair_loss(given, logps), logps), own)

    def _compared(self, batch: Batch, windows: Windows | None) -> tuple[Batch, PairLogps, Tensor]:
        """The pairs that the loss is given at once, and which of them are the batch's and real.

        They are those of the batch. A loss that compares them with each other is given all real
        ones of the window: the batch's own live, and numbers for the others.

        Args:
            batch: of training or validation.
            windows: of training; None: each batch stands for itself.
        """
        if not self.needs_window:
            return batch, self.pair_logps(batch, statistics=True), pair_mask(batch)
        if windows is None:
            rows = self._pair_rows(batch)
            rows, own = WholeWindow([rows]).around(rows)
        else:
            windows.look_ahead(self, batch, self._pair_rows, pair_mask(batch), self.loss.title)
            rows, own = windows.around(self._pair_rows(batch, reference_known=windows.is_open))
        return rows, PairLogps._make(rows.get(name) for name in PairLogps._fields), own

    def _pair_rows(self, batch: Batch, *, reference_known: bool = False) -> Rows:
        """Everything that losses read of each pair, and what it is told by."""
        found = self.pair_logps(batch, statistics=True)._asdict()
        if self.loss.reads_reference and not reference_known:
            found |= self.reference_rows(batch)
        mask = pair_mask(batch)
        index = batch.get("index", torch.arange(len(mask), device=mask.device))
        columns = {n: t for n, t in batch.items() if isinstance(t, Tensor) and t.dim() == 1}
        return {
            **columns,
            **{name: tensor for name, tensor in found.items() if tensor is not None},
            "index": index,
            "key": index.unsqueeze(-1),
            "is_real": mask,
        }

    def means_of(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return pair_means(sums)

    def on_validation_epoch_end(self) -> None:
        means = pair_means(self.val_sums.compute())
        self.val_sums.reset()
        # They are those of all ranks already; Lightning warns of what it did not reduce itself.
        self.log_dict({f"val/{name}": value for name, value in means.items()}, sync_dist=True)


def pair_mask(batch: Batch) -> Tensor:
    """Which rows are real pairs, (B,) bool; a loader of the user's own has only real ones."""
    if "pair_mask" in batch:
        return batch["pair_mask"]
    return torch.ones_like(batch["chosen_labels"][:, 0], dtype=torch.bool)


def _config(loss: str | PairConfig | Mapping[str, Any]) -> PairConfig:
    if isinstance(loss, GRPOConfig):
        raise UserError(
            f"'{loss.loss_fn}' is a loss of completions: choose a loss of pairs, such as dpo, or "
            "GRPOModule (module=grpo)"
        )
    if isinstance(loss, UnpairedConfig):
        raise UserError(
            f"{loss.title} is a loss of labelled completions: choose a loss of pairs, such as dpo, "
            "or UnpairedModule (module=unpaired)"
        )
    return pair_config(loss)
