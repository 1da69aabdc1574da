"""From a config and a batch to a loss of labelled completions: one call for all variants."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lit_align.losses.cache import TensorCache
from lit_align.losses.config import FrozenConfig
from lit_align.losses.dispatch import cached_reference
from lit_align.losses.pairs import PREFERENCE_LOSSES
from lit_align.losses.unpaired import UNPAIRED_LOSSES, UnpairedLoss
from lit_align.losses.variants import Variant

PREFERENCE_LOSSES.hints.update(
    {name: f"a loss of labelled completions: UnpairedConfig('{name}')" for name in UNPAIRED_LOSSES}
)


class UnpairedConfig(FrozenConfig):
    """Which loss of labelled completions, and every hyperparameter it takes, as attributes.

    Args:
        loss_type: name of a loss.
        hyperparameters: the ones to set; the others have the loss's own defaults.

    Raises:
        UserError: for an unknown loss, a hyperparameter it does not take, or a value it cannot
            honour.
    """

    loss_type: str

    def __init__(self, loss_type: str = "kto", **hyperparameters: float | str | None) -> None:
        variant = UNPAIRED_LOSSES[loss_type]
        vars(self).update(loss_type=variant.name, **variant.settings(hyperparameters))

    @property
    def title(self) -> str:
        """What messages call it."""
        return str(self.variant)

    @property
    def variant(self) -> Variant:
        """The function, and what it reads."""
        return UNPAIRED_LOSSES[self.loss_type]

    @property
    def reads_reference(self) -> bool:
        """Whether it compares the policy with a reference."""
        return self.variant.reads_reference

    @property
    def reads_mismatched(self) -> bool:
        """Whether it wants to know what policy and reference say of completions of other prompts.

        They are what the reference point `kl` is an average over.
        """
        return "kl" in self.variant.tensors

    def _lacks(self, name: str) -> str:
        return f"loss '{vars(self).get('loss_type')}' has no hyperparameter '{name}'"


def compute_unpaired_loss(
    args: Any,
    batch: Mapping[str, Tensor],
    policy_logps: Tensor,
    reference_cache: TensorCache | None = None,
) -> UnpairedLoss:
    """The loss of labelled completions that `args` names, with the tensors it reads.

    Args:
        args: an `UnpairedConfig`, or any object with `loss_type` and the loss's hyperparameters as
            attributes (one it lacks has the loss's default).
        batch: holds `labels`, (B,), bool; `reference_logps`, (B,), nats, or `index`, (B,), rows of
            the reference cache; if the loss reads them, `kl` and `delta`, (); and maybe `weight`,
            (B,), by which the loss of each row is multiplied.
        policy_logps: of the completions, sums, (B,), nats.
        reference_cache: holds `completion_logps` of the reference; None if the batch has them.

    Returns:
        Losses and rewards, (B,) each; the rewards are detached.

    Raises:
        ValueError: for an unknown loss, or if something it reads is missing or misshapen.
    """
    variant = UNPAIRED_LOSSES[args.loss_type]
    read = (*variant.tensors, *variant.optional_tensors)
    available = {name: batch[name] for name in read if name in batch}
    if "reference_logps" not in available:
        rows = cached_reference(str(variant), batch, reference_cache)
        available["reference_logps"] = rows["reference_completion_logps"]
    result: UnpairedLoss = variant(available | {"policy_logps": policy_logps}, args)
    if "weight" in batch:
        result = result._replace(losses=batch["weight"] * result.losses)
    return result
