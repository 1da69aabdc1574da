"""From a config and a batch to a preference loss: one call for all variants."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from torch import Tensor

from lit_align.errors import UserError
from lit_align.losses.cache import TensorCache
from lit_align.losses.config import FrozenConfig
from lit_align.losses.pairs import PREFERENCE_LOSSES, PairLoss
from lit_align.losses.variants import Variant
from lit_align.ops import completion_lengths


class DPOLossType(StrEnum):
    """The losses of open-instruct's DPO trainer, under its names."""

    dpo = "dpo"
    dpo_norm = "dpo_norm"
    simpo = "simpo"
    wpo = "wpo"


class DPOConfig(FrozenConfig):
    """Which preference loss, and every hyperparameter it takes, as attributes.

    Two configs of one loss with the same values are equal, whichever alias named them.

    Args:
        loss_type: name of a loss.
        hyperparameters: the ones to set; the others have the loss's own defaults.

    Raises:
        UserError: for an unknown loss, a hyperparameter it does not take, or a value it cannot
            honour.
    """

    loss_type: str

    def __init__(self, loss_type: str = "dpo", **hyperparameters: float | str | None) -> None:
        variant = PREFERENCE_LOSSES[loss_type]
        vars(self).update(loss_type=variant.name, **variant.settings(hyperparameters))

    @property
    def variant(self) -> Variant:
        """The function, and what it reads."""
        return PREFERENCE_LOSSES[self.loss_type]

    def _lacks(self, name: str) -> str:
        return f"loss '{vars(self).get('loss_type')}' has no hyperparameter '{name}'"


def compute_loss(
    args: Any,
    batch: Mapping[str, Tensor],
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    reference_cache: TensorCache | None = None,
) -> PairLoss:
    """The loss that `args` names, with the tensors it reads.

    Args:
        args: a `DPOConfig`, or any object with `loss_type` and the loss's hyperparameters as
            attributes (one it lacks has the loss's default).
        batch: may hold `index`, (B,), rows of the reference cache; `chosen_labels` and
            `rejected_labels`, (B, T), whose widths may differ; `chosen_alignment_logps` and
            `rejected_alignment_logps`, (B,), nats; `margin`, (B,); `delta`, (). Only what the loss
            reads needs to be there.
        policy_chosen_logps: of the preferred responses, (B,), nats: sums, or means per token if
            `args.variant.average_logps`.
        policy_rejected_logps: of the other responses, likewise.
        reference_cache: holds `chosen_logps` and `rejected_logps` of the reference, sums or means
            like the policy's; None for a loss that reads no reference.

    Returns:
        Losses, chosen rewards and rejected rewards, (B,) each; the rewards are detached.

    Raises:
        ValueError: for an unknown loss, or if something it reads is missing or misshapen.
    """
    variant = PREFERENCE_LOSSES[args.loss_type]
    available = {
        **{name: batch[name] for name in variant.optional_tensors if name in batch},
        **_columns(variant, batch),
        "policy_chosen_logps": policy_chosen_logps,
        "policy_rejected_logps": policy_rejected_logps,
    }
    if variant.reads_lengths:
        available |= _lengths(batch)
    if variant.reads_reference:
        available |= _reference_logps(variant, batch, reference_cache)
    result: PairLoss = variant(available, args)
    return result


def _columns(variant: Variant, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the loss reads of the data itself."""
    if missing := [name for name in variant.columns if name not in batch]:
        raise UserError(
            f"loss '{variant.name}' reads {', '.join(missing)} of each pair, which the batch does "
            "not have: add such a column to the data"
        )
    return {name: batch[name] for name in variant.columns}


def _lengths(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scored tokens of each response whose labels are in the batch."""
    return {
        f"{side}_lengths": completion_lengths(batch[f"{side}_labels"])
        for side in ("chosen", "rejected")
        if f"{side}_labels" in batch
    }


def _reference_logps(
    variant: Variant, batch: Mapping[str, Tensor], cache: TensorCache | None
) -> dict[str, Tensor]:
    """What the reference says of the batch's rows."""
    if cache is None:
        raise UserError(
            f"loss '{variant.name}' compares the policy with a reference, and there is none: "
            "add the ReferenceCache callback to the Trainer, or pass a reference_cache"
        )
    if "index" not in batch:
        raise UserError(
            f"loss '{variant.name}' finds its reference by batch['index'], which is missing"
        )
    rows = cache[batch["index"]]
    return {f"reference_{side}_logps": rows[f"{side}_logps"] for side in ("chosen", "rejected")}
