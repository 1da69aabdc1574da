"""From a config and a batch to a preference loss: one call for all variants."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from torch import Tensor

from lit_align.errors import UserError
from lit_align.losses.cache import TensorCache
from lit_align.losses.columns import check_batch, exchanged, soft_labelled, weighted
from lit_align.losses.pair_config import Alignment, PairConfig, Term
from lit_align.losses.pairs import PREFERENCE_LOSSES, PairLoss
from lit_align.losses.variants import Variant
from lit_align.losses.wpo import check_wpo, wpo_weighted
from lit_align.ops import completion_lengths


class DPOLossType(StrEnum):
    """The losses of open-instruct's DPO trainer, under its names."""

    dpo = "dpo"
    dpo_norm = "dpo_norm"
    simpo = "simpo"
    wpo = "wpo"


class DPOConfig(PairConfig):
    """Which preference loss, and every hyperparameter it takes, as attributes.

    Two configs of one loss with the same values are equal, whichever alias named them.

    Args:
        loss_type: name of a loss.
        wpo: None; or "sampled", "greedy" or "none": each pair's loss counts as much as the policy
            would write it, with alignment terms of this kind or without (see `wpo_weights`). An
            attribute only if it is set.
        hyperparameters: the ones to set; the others have the loss's own defaults.

    Raises:
        UserError: for an unknown loss, a hyperparameter it does not take, or a value it cannot
            honour.
    """

    loss_type: str

    def __init__(
        self,
        loss_type: str = "dpo",
        *,
        wpo: str | None = None,
        **hyperparameters: float | str | None,
    ) -> None:
        _refuse_lists(loss_type, hyperparameters)
        variant = PREFERENCE_LOSSES[loss_type]
        check_wpo(variant, wpo)
        vars(self).update(loss_type=variant.name, **variant.settings(hyperparameters))
        if wpo is not None:
            vars(self).update(wpo=wpo)

    @property
    def title(self) -> str:
        """What messages call it."""
        return str(self.variant)

    @property
    def variant(self) -> Variant:
        """The function, and what it reads."""
        return PREFERENCE_LOSSES[self.loss_type]

    @property
    def terms(self) -> dict[str, Term]:
        """Itself, with weight 1."""
        return {self.loss_type: Term(1.0, self)}

    @property
    def average_logps(self) -> bool:
        """Whether it reads means of log-probs per token instead of sums."""
        return self.variant.average_logps

    @property
    def alignment_kind(self) -> Alignment | None:
        """Which alignment terms of WPO it reads; the authors recommend the sampled ones."""
        kind: Any = vars(self).get("wpo")
        if self.variant.reads_alignment:
            kind = self.alignment or "sampled"
        return None if kind == "none" else kind

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
            attributes (one it lacks has the loss's default), and perhaps `wpo`.
        batch: may hold every tensor that the loss names: `chosen_lengths` and `rejected_lengths`,
            (B,), else counted in `chosen_labels` and `rejected_labels`, (B, T), whose widths may
            differ; `reference_chosen_logps` and `reference_rejected_logps`, (B,), nats, else
            looked up by `index`, (B,), the rows of the reference cache;
            `chosen_alignment_logps` and `rejected_alignment_logps`, (B,), nats; `delta`, (). Only
            what the loss reads needs to be there. Of the columns of the data, `weight`, `margin`
            and `label_prob`, (B,), see `columns`, none may be there that the loss cannot honour.
        policy_chosen_logps: of the preferred responses, (B,), nats: sums, or means per token if
            `args.variant.average_logps`.
        policy_rejected_logps: of the other responses, likewise.
        reference_cache: holds `chosen_logps` and `rejected_logps` of the reference, sums or means
            like the policy's; None for a loss that reads no reference, or if the batch has them.

    Returns:
        Losses, chosen rewards and rejected rewards, (B,) each; the rewards are detached. Losses
        are those of soft labels if there is a `label_prob`, times the weights of WPO if `args` has
        a `wpo`, and times `weight` if there is one: whoever takes their mean divides by the number
        of pairs. Rewards are those of the pairs as they stand.

    Raises:
        ValueError: for an unknown loss, or if something it reads is missing or misshapen.
        UserError: for a column that the loss cannot honour.
    """
    variant = PREFERENCE_LOSSES[args.loss_type]
    check_batch(variant, batch)
    check_wpo(variant, wpo := getattr(args, "wpo", None))
    read = (*variant.tensors, *variant.optional_tensors)
    available = {name: batch[name] for name in read if name in batch}
    if variant.reads_lengths:
        available = _lengths(batch) | available
    if variant.reads_reference and not variant.reference_tensors <= available.keys():
        available |= cached_reference(str(variant), batch, reference_cache)
    available["policy_chosen_logps"] = policy_chosen_logps
    available["policy_rejected_logps"] = policy_rejected_logps
    result: PairLoss = variant(available, args)
    if "label_prob" in batch and "label_prob" not in read:
        flipped = variant(exchanged(available), args)
        result = soft_labelled(result, flipped, batch["label_prob"])
    if wpo is not None:
        tensors = {**_lengths(batch), **batch, **available}
        result = wpo_weighted(result, wpo, tensors, average_logps=variant.average_logps)
    return weighted(result, batch["weight"]) if "weight" in batch else result


def _refuse_lists(loss_type: Any, hyperparameters: Mapping[str, Any]) -> None:
    """Say how TRL's lists of losses and weights are written here."""
    if not isinstance(loss_type, list | tuple):
        return
    weights = hyperparameters.get("loss_weights")
    if not isinstance(weights, list | tuple) or len(weights) != len(loss_type):
        weights = [1.0] * len(loss_type)
    terms = {name: {"weight": weight} for name, weight in zip(loss_type, weights, strict=True)}
    raise UserError(
        f"a sum of losses is CombinedConfig({terms}), with the options of each term beside its "
        "weight; in a file of conf/loss/ it is written like mpo.yaml"
    )


def _lengths(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scored tokens of each response whose labels are in the batch."""
    return {
        f"{side}_lengths": completion_lengths(batch[f"{side}_labels"])
        for side in ("chosen", "rejected")
        if f"{side}_labels" in batch
    }


def cached_reference(
    title: str, batch: Mapping[str, Tensor], cache: TensorCache | None
) -> dict[str, Tensor]:
    """What the reference says of the batch's rows, by the names that losses give it.

    Args:
        title: what messages call the loss.
        batch: holds `index`, (B,).
        cache: by row index.

    Returns:
        Each tensor of the cache, (B,), under its name with `reference_` before it.

    Raises:
        UserError: if there is no cache, or no index.
    """
    if cache is None:
        raise UserError(
            f"{title} compares the policy with a reference, and there is none: "
            "add the ReferenceCache callback to the Trainer, or pass a reference_cache"
        )
    if "index" not in batch:
        raise UserError(f"{title} finds its reference by batch['index'], which is missing")
    return {f"reference_{name}": values for name, values in cache[batch["index"]].items()}
