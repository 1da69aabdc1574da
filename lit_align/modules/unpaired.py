"""Learning from completions that are desirable or not as a LightningModule.

Everything that makes one loss differ from another is in its config (`UnpairedConfig`); here are
only the reference point of an optimizer step, its normalisation and the metrics.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from lit_align.data import UnpairedDataModule
from lit_align.errors import UserError
from lit_align.logprobs import Layout
from lit_align.losses import (
    GRPOConfig,
    PairConfig,
    UnpairedConfig,
    UnpairedLoss,
    compute_unpaired_loss,
    reference_point,
)
from lit_align.modules.comparing import ComparingModule
from lit_align.modules.completion_logps import CompletionLogps, side_logps
from lit_align.modules.labelled_metrics import (
    LABELLED_SUMS,
    labelled_means,
    labelled_sums,
    ranked_right,
)
from lit_align.modules.metrics import Sums
from lit_align.modules.policy import Batch, Loadable
from lit_align.modules.ranks import from_all_replicas
from lit_align.modules.running import RunningNumbers
from lit_align.modules.whole_window import Rows, Windows
from lit_align.modules.window import window_mean

# What desirable rows weigh together, as a multiple of the others: the paper of KTO advises 1 to
# 4/3. Warned of is what is outside by more than the odd row.
ADVISED = (1.0, 4 / 3)
SLACK = 1.1


class UnpairedModule(ComparingModule):
    """Trains a policy on completions, each labelled desirable or undesirable.

    The losses compare with a reference and need the `ReferenceCache` callback in the Trainer, or
    `ReferenceRefresh`.

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

    rows = "labelled completions"
    sides = ("completion", "mismatched")
    loss: UnpairedConfig

    def __init__(
        self,
        policy: Loadable | nn.Module,
        loss: str | UnpairedConfig | Mapping[str, Any] = "kto",
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
        self.running = RunningNumbers({self.loss.loss_type: self.loss})
        self.train_sums = Sums(*LABELLED_SUMS)
        self._validated: list[Rows] = []

    def setup(self, stage: str) -> None:
        """Refuse, before anything is loaded, other data, and say if one class outweighs the other.

        Raises:
            UserError: if the data holds something else.
        """
        data = getattr(self.trainer, "datamodule", None)
        if getattr(data, "rows", None) == "pairs":
            raise UserError(
                f"{type(self).__name__} learns from {self.rows}, and {type(data).__name__} holds "
                "pairs: read the same file with UnpairedDataModule (data=unpaired), which makes "
                "two completions of each pair"
            )
        super().setup(stage)
        if isinstance(data, UnpairedDataModule):
            self._warn_of_weights(*data.train_rows.classes())
            if len(data.val_rows) and not all(data.val_rows.classes()):
                rank_zero_warn(
                    "the rows to validate on are of one class, so that there is no "
                    "val/rewards/accuracies: hold out more of them (data.val_split), or choose the "
                    "best policy by something else (callbacks.save_policy.best, null: not at all)"
                )

    def _warn_of_weights(self, desirable: int, undesirable: int) -> None:
        if not desirable or not undesirable:
            rank_zero_warn(
                f"all rows to train on are {'desirable' if desirable else 'undesirable'}: nothing "
                "says what to prefer them to"
            )
            return
        share = desirable / undesirable
        ratio = self.loss.desirable_weight * share / max(self.loss.undesirable_weight, 1e-12)
        if ADVISED[0] / SLACK <= ratio <= ADVISED[1] * SLACK:
            return
        least, most = (self.loss.undesirable_weight * bound / share for bound in ADVISED)
        rank_zero_warn(
            f"of the rows to train on {desirable} are desirable and {undesirable} are not; with "
            f"their weights the first count {ratio:.2g} times as much as the others. The authors "
            "of KTO (arXiv:2402.01306) advise 1 to 4/3 times: loss.desirable_weight between "
            f"{least:.3g} and {most:.3g}, or loss.undesirable_weight accordingly"
        )

    @property
    def needs_mismatched(self) -> bool:
        """Whether each row is to come with a completion of another prompt."""
        return self.loss.reads_mismatched

    @property
    def needs_window(self) -> bool:
        """Whether the loss has a reference point, which is one of the whole optimizer step."""
        return self.loss.reads_mismatched

    @property
    def asked_sides(self) -> tuple[str, ...]:
        return self.sides if self.loss.reads_mismatched else self.sides[:1]

    def response_logps(self, batch: Batch, model: nn.Module | None = None) -> CompletionLogps:
        """Log-probs of the completions, and of the mismatched ones if the loss reads them."""
        model = self.policy if model is None else model
        sides = (side_logps(model, batch, side, self.layout) for side in self.asked_sides)
        return CompletionLogps(*(part for side in sides for part in side))

    def response_loss(self, batch: Batch, logps: CompletionLogps) -> UnpairedLoss:
        """Losses and rewards per row, with the reference point of the batch if it has no other."""
        given = {**batch, **self.running[self.loss.loss_type]}
        reference = self.reference_rows(batch)
        given["reference_logps"] = reference["reference_completion_logps"]
        if logps.mismatched is not None and "kl" not in batch:
            ratios = logps.mismatched - reference["reference_mismatched_logps"]
            given["kl"] = reference_point(ratios[row_mask(batch)])
        return compute_unpaired_loss(self.loss, given, logps.completion)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        given = {**batch, **self._point_of_step(batch)}
        logps = CompletionLogps(*side_logps(self.policy, batch, "completion", self.layout))
        found = self.response_loss(given, logps)
        mask = row_mask(batch)
        self.running.observe({self.loss.loss_type: found}, mask)
        self.train_sums.update(
            labelled_sums(found, logps.completion, batch["labels"], mask, given.get("kl"))
        )
        return window_mean(found.losses, mask, batch.get("window_pairs"), self.trainer)

    def _point_of_step(self, batch: Batch) -> dict[str, Tensor]:
        """The reference point of the optimizer step, over all its micro-batches and ranks."""
        if not self.loss.reads_mismatched:
            return {}
        for given in (batch, {**batch, "window": [batch]}):
            # A step of one micro-batch comes without a window, and is one.
            if not self.windows.is_open:
                self.windows.look_ahead(
                    self, given, self._log_ratios, row_mask(batch), self.loss.title
                )
        rows, _ = self.windows.around(_known_by(batch))
        return {"kl": reference_point(rows["log_ratio"])}

    def _log_ratios(self, batch: Batch) -> Rows:
        """How much likelier the mismatched completions are than under the reference."""
        policy, _ = side_logps(self.policy, batch, "mismatched", self.layout)
        reference = self.reference_rows(batch)["reference_mismatched_logps"]
        return {"log_ratio": policy - reference, **_known_by(batch)}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Keep of each row what its loss is made of: the reference point is that of all rows."""
        logps = self.response_logps(batch)
        rows = {**_known_by(batch), "labels": batch["labels"], "policy_logps": logps.completion}
        reference = self.reference_rows(batch)
        rows["reference_logps"] = reference["reference_completion_logps"]
        if logps.mismatched is not None:
            rows["log_ratio"] = logps.mismatched - reference["reference_mismatched_logps"]
        if "weight" in batch:
            rows["weight"] = batch["weight"]
        mask = row_mask(batch)
        self._validated.append({name: values[mask].cpu() for name, values in rows.items()})

    def on_validation_epoch_start(self) -> None:
        self._validated = []

    def on_validation_epoch_end(self) -> None:
        parts = [part for mine in from_all_replicas(self.trainer, self._validated) for part in mine]
        self._validated = []
        rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        # In one order on any number of ranks.
        order = rows["key"].squeeze(-1).argsort(stable=True)
        means = self._val_means({name: values[order] for name, values in rows.items()})
        # They are those of all ranks already; Lightning warns of what it did not reduce itself.
        self.log_dict({f"val/{name}": value for name, value in means.items()}, sync_dist=True)

    def _val_means(self, rows: Rows) -> dict[str, Tensor]:
        kl = reference_point(rows["log_ratio"]) if "log_ratio" in rows else None
        given = {**rows, **self.running[self.loss.loss_type]} | ({} if kl is None else {"kl": kl})
        found = compute_unpaired_loss(self.loss, given, rows["policy_logps"])
        everything = rows["is_real"]
        sums = labelled_sums(found, rows["policy_logps"], rows["labels"], everything, kl)
        means = labelled_means(sums)
        right = ranked_right(found.rewards, rows["labels"])
        return means if right is None else {**means, "rewards/accuracies": right.float()}

    def means_of(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        without = () if self.loss.reads_mismatched else ("kl",)
        return labelled_means({name: s for name, s in sums.items() if name not in without})


def row_mask(batch: Batch) -> Tensor:
    """Which rows are real, (B,) bool; a loader of the user's own has only real ones."""
    if "pair_mask" in batch:
        return batch["pair_mask"]
    return torch.ones_like(batch["labels"], dtype=torch.bool)


def _known_by(batch: Batch) -> Rows:
    """What the rows of a batch are told from others by."""
    mask = row_mask(batch)
    index = batch.get("index", torch.arange(len(mask), device=mask.device))
    return {"key": index.unsqueeze(-1), "is_real": mask}


def _config(loss: str | UnpairedConfig | Mapping[str, Any]) -> UnpairedConfig:
    if isinstance(loss, UnpairedConfig):
        return loss
    if isinstance(loss, PairConfig):
        raise UserError(
            f"{loss.title} is a loss of pairs: choose one of labelled completions, such as kto, or "
            "DPOModule (module=dpo)"
        )
    if isinstance(loss, GRPOConfig):
        raise UserError(
            f"'{loss.loss_fn}' is a loss of policies: choose one of labelled completions, such as "
            "kto, or GRPOModule (module=grpo)"
        )
    if not isinstance(loss, str | Mapping):
        raise UserError(f"a loss is a name, a config or the values of one, not {loss!r}")
    return UnpairedConfig(loss) if isinstance(loss, str) else UnpairedConfig(**loss)
