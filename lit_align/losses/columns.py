"""Columns of the data that say something of each pair by itself, and which losses honour them.

* `weight`: how much a pair counts. Its loss is multiplied by it; what is divided by stays the
  number of pairs, so that doubling all weights doubles the loss. What a loss remembers from step to
  step, such as the mean reward of `bco_pair`, counts every pair once.
* `label_prob`: how sure it is that the chosen response is the better one, p. The pair counts as
  two: as it stands with weight p, and with its sides exchanged with weight 1 - p.
* `margin`: by how much the chosen response is to lead; each loss that names it says in what unit.

A loss reads what its signature names. The first two are done to its result by `compute_loss`, for
every loss that looks at one pair at a time.
"""

from collections.abc import Collection, Mapping

from torch import Tensor

from lit_align.errors import UserError
from lit_align.losses.pair_config import PairConfig
from lit_align.losses.pairs import PairLoss
from lit_align.losses.variants import LARGEST, Range, Variant
from lit_align.ops import check_same_shape

PAIR_COLUMNS: Mapping[str, Range] = {
    "weight": Range(least=0, most=LARGEST),
    "margin": Range(least=-LARGEST, most=LARGEST),
    "label_prob": Range(least=0, most=1),
}
# What a row without a value has; there is no margin that would mean none to every loss.
WITHOUT_VALUE: Mapping[str, float] = {"weight": 1.0, "label_prob": 1.0}


def objection(variant: Variant, column: str) -> str | None:
    """Why a loss cannot honour a column; None: it can."""
    if column in (*variant.tensors, *variant.optional_tensors):
        return None
    if column == "margin":
        return "asks for no lead that a row could set"
    if variant.whole_window:
        return "compares all pairs of a step with each other"
    if column == "label_prob" and "margin" in variant.tensors:
        return "reads a margin, which means nothing for the sides exchanged"
    return None


def check_columns(config: PairConfig, columns: Collection[str], place: str) -> None:
    """Refuse data that says of its pairs what a loss cannot honour, or not what it needs.

    A sum of losses honours `weight` and `label_prob` if each term does, and `margin`, which is not
    of the pair but of its preference terms, if one does.

    Args:
        config: of the loss.
        columns: of the data; others than `PAIR_COLUMNS` do not matter.
        place: where they stand, for the message, as in "the training data".

    Raises:
        UserError: naming loss, column and remedy.
    """
    needed = [name for name in config.columns if name in PAIR_COLUMNS]
    if missing := [name for name in needed if name not in columns]:
        raise UserError(
            f"{config.title} reads {' and '.join(missing)} of each pair, which {place} does not "
            "have: add such a column, or choose another loss"
        )
    for column in PAIR_COLUMNS:
        objections = {
            str(term.config.variant): objection(term.config.variant, column)
            for term in config.terms.values()
        }
        against = {title: why for title, why in objections.items() if why}
        enough = len(against) < len(objections) if column == "margin" else not against
        if column in columns and not enough:
            title, why = next(iter(against.items()))
            raise UserError(_refusal(title, why, column, place))


def remark(config: PairConfig, columns: Collection[str], place: str) -> str | None:
    """What is worth saying of data that lacks what a loss was made for; None: nothing."""
    for term in config.terms.values():
        variant = term.config.variant
        if "label_prob" in variant.optional_tensors and "label_prob" not in columns:
            return f"{variant} takes every label for certain: {place} has no column 'label_prob'"
    return None


def check_batch(variant: Variant, batch: Mapping[str, Tensor]) -> None:
    """The same for one loss and a batch, of which the values are looked at as well.

    Raises:
        UserError: naming loss, column and remedy, or the pair with the first bad value.
    """
    if missing := [name for name in variant.columns if name not in batch]:
        raise UserError(
            f"{variant} reads {' and '.join(missing)} of each pair, which the batch does not "
            "have: add such a column to the data"
        )
    for column, rule in PAIR_COLUMNS.items():
        if column not in batch:
            continue
        if why := objection(variant, column):
            raise UserError(_refusal(str(variant), why, column, "the batch"))
        bad = ~((batch[column] >= rule.least) & (batch[column] <= rule.most))
        if bad.any():
            row = int(bad.nonzero()[0])
            raise UserError(
                f"'{column}' must be {rule}, and is {batch[column][row].item():g} for pair {row} "
                "of the batch"
            )


def _refusal(title: str, why: str, column: str, place: str) -> str:
    return (
        f"{title} {why}, and so cannot honour the column '{column}' that {place} has: rename "
        f"the column, choose another loss, or set data.ignore_columns=[{column}]"
    )


def of_term(variant: Variant, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch as one term of a sum reads it: without a margin that is for other terms."""
    unread = "margin" if objection(variant, "margin") else None
    return {name: tensor for name, tensor in batch.items() if name != unread}


def exchanged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of pairs with their sides exchanged: each `chosen` is a `rejected` and back."""
    return {_other_side(name): tensor for name, tensor in tensors.items()}


def _other_side(name: str) -> str:
    sides = {"chosen": "rejected", "rejected": "chosen"}
    return "_".join(sides.get(part, part) for part in name.split("_"))


def soft_labelled(pair: PairLoss, flipped: PairLoss, label_prob: Tensor) -> PairLoss:
    """The expected loss of labels that are right with some probability.

        losses = label_prob * losses + (1 - label_prob) * losses of the sides exchanged

    Args:
        pair: of the pairs as they stand; its rewards are kept.
        flipped: of the same pairs with their sides exchanged.
        label_prob: that the chosen response is the better one, (B,), in [0, 1].

    Raises:
        ValueError: if the shapes differ.

    Source:
        Mitchell 2023, eq. 3 of https://ericmitchell.ai/cdpo.pdf, with a probability for each pair.
    """
    check_same_shape(losses=pair.losses, label_prob=label_prob)
    right = label_prob.to(pair.losses.dtype)
    return pair._replace(losses=right * pair.losses + (1 - right) * flipped.losses)


def weighted(pair: PairLoss, weight: Tensor) -> PairLoss:
    """Each pair's loss times its weight, (B,), >= 0; the rewards stay as they are.

    Raises:
        ValueError: if the shapes differ.
    """
    check_same_shape(losses=pair.losses, weight=weight)
    return pair._replace(losses=weight.to(pair.losses.dtype) * pair.losses)
