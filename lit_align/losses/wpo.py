"""WPO's weights on whatever loss: what `wpo` among the options of a config does.

The loss `wpo` itself is `dpo` with them.
"""

from collections.abc import Mapping

from torch import Tensor

from lit_align.errors import UserError
from lit_align.losses.pairs import PairLoss
from lit_align.losses.preference import wpo_weights
from lit_align.losses.variants import OneOf, Variant

# None: no weights; "none": weights without alignment terms, as the option of the loss `wpo` has it.
KINDS = OneOf((None, "none", "sampled", "greedy"))
SIDES = ("chosen", "rejected")


def check_wpo(variant: Variant, kind: object) -> None:
    """Refuse weights where they cannot be honoured.

    Args:
        variant: the loss.
        kind: of alignment terms, one of `KINDS`.

    Raises:
        UserError: for another value, or for a loss that has these weights or compares pairs.
    """
    if not KINDS.admits(kind):
        raise UserError(f"{variant}: wpo must be {KINDS}, not {kind!r}")
    if kind is None:
        return
    if variant.reads_alignment:
        raise UserError(
            f"{variant} has these weights without the option wpo: leave it out, and say by "
            "alignment of what kind they are"
        )
    if variant.whole_window:
        raise UserError(
            f"{variant} compares all pairs of a step with each other, and so cannot honour wpo, "
            "which weighs each pair: choose another loss"
        )


def wpo_weighted(
    pair: PairLoss, kind: str, tensors: Mapping[str, Tensor], *, average_logps: bool
) -> PairLoss:
    """Each pair's loss times how likely the policy is to write it; rewards stay as they are.

        losses = wpo_weights(...) * losses

    Args:
        pair: what the loss says.
        kind: "sampled" or "greedy": with alignment terms of this kind; "none": without.
        tensors: `policy_chosen_logps`, `chosen_lengths`, `chosen_alignment_logps` and those of
            `rejected`, (B,) each.
        average_logps: whether the log-probs are means per token, not sums.

    Raises:
        ValueError: if one of them is missing or misshapen.

    Source:
        Zhou et al. 2024 (WPO), arXiv:2406.11827: the weights suit any preference loss.
    """
    wanted = ["policy_{}_logps", "{}_lengths", *(["{}_alignment_logps"] * (kind != "none"))]
    names = [pattern.format(side) for pattern in wanted for side in SIDES]
    if missing := [name for name in names if name not in tensors]:
        raise ValueError(f"wpo '{kind}' needs {', '.join(missing)}")
    logps, lengths, *alignment = (
        [tensors[pattern.format(side)] for side in SIDES] for pattern in wanted
    )
    if average_logps:
        logps = [mean * length for mean, length in zip(logps, lengths, strict=True)]
    weights = wpo_weights(*logps, *lengths, *(term for both in alignment for term in both))
    return pair._replace(losses=weights * pair.losses)
