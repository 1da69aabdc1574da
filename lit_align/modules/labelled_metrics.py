"""What is logged of labelled completions, by TRL's names: desirable ones are the chosen ones."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_align.losses import UnpairedLoss
from lit_align.ops import masked_sum

CLASSES = ("chosen", "rejected")
OF_A_CLASS = ("rewards", "logps")
LABELLED_SUMS = (
    *("rows", "loss", "kl", *CLASSES),
    *(f"{what}/{side}" for what in OF_A_CLASS for side in CLASSES),
)


def labelled_sums(
    found: UnpairedLoss, logps: Tensor, labels: Tensor, mask: Tensor, kl: Tensor | None
) -> dict[str, Tensor]:
    """Sums over the rows that count, and how many those are, of each class as well.

    Args:
        found: what the loss says of each row.
        logps: of the completions under the policy, (B,), nats.
        labels: which rows are desirable, (B,) bool.
        mask: which rows count, (B,) bool.
        kl: the reference point that they were compared with, (), nats; None: none.

    Returns:
        Detached, () each, by the names of `LABELLED_SUMS`; without `kl` if there is none.
    """
    values = {"rewards": found.rewards, "logps": logps.detach()}
    sums = {"rows": mask.sum(), "loss": masked_sum(found.losses.detach(), mask)}
    if kl is not None:
        sums["kl"] = kl * mask.sum()
    for side, is_of_class in zip(CLASSES, (labels & mask, ~labels & mask), strict=True):
        sums[side] = is_of_class.sum()
        for what in OF_A_CLASS:
            sums[f"{what}/{side}"] = masked_sum(values[what], is_of_class)
    return sums


def labelled_means(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Means over all rows and over those of each class, of what there were any rows of.

    `rewards/margins` is by how much the mean reward of desirable rows is above that of the others.
    """
    means = {
        name: sums[name] / sums["rows"].clamp(min=1) for name in ("loss", "kl") if name in sums
    }
    for side in CLASSES:
        if sums[side] > 0:
            means |= {f"{what}/{side}": sums[f"{what}/{side}"] / sums[side] for what in OF_A_CLASS}
    rewards = [means[f"rewards/{side}"] for side in CLASSES if f"rewards/{side}" in means]
    if len(rewards) == len(CLASSES):
        means["rewards/margins"] = rewards[0] - rewards[1]
    return means


def ranked_right(rewards: Tensor, labels: Tensor) -> Tensor | None:
    """How often a desirable completion has a higher reward than an undesirable one, () in [0, 1].

    The share is of all couples of one and the other, of whatever prompts; a tie counts half. It is
    the area under the ROC curve of the rewards. None: there is no couple.
    """
    chosen, rejected = rewards[labels], rewards[~labels].sort().values
    if not len(chosen) or not len(rejected):
        return None
    below, not_above = (torch.searchsorted(rejected, chosen, right=r) for r in (False, True))
    return (below + not_above).double().mean() / (2 * len(rejected))
