"""What is logged of pairs, by TRL's names."""

from collections.abc import Mapping

import torch
from torch import Tensor

from lit_align.losses import PairLoss
from lit_align.modules.pair_logps import PairLogps

# Means over pairs.
OF_PAIRS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
    "ranking_accuracies",
)
# Means over the scored tokens of one response or of both, and the sums that they are made of.
OF_TOKENS = {
    "entropy": ("chosen_entropy", "rejected_entropy"),
    "mean_token_accuracy": ("chosen_likeliest",),
    "logits/chosen": ("chosen_mean_logit",),
    "logits/rejected": ("rejected_mean_logit",),
}
_STATISTICS = tuple(dict.fromkeys(name for names in OF_TOKENS.values() for name in names))
PAIR_SUMS = (*OF_PAIRS, "pairs", *_STATISTICS, "chosen_lengths", "rejected_lengths")


def pair_metrics(pair: PairLoss, logps: PairLogps) -> dict[str, Tensor]:
    """What is averaged over pairs, (B,) each.

    `rewards/*` are the rewards inside the loss; `logps/*` are sums over the response, in nats;
    `ranking_accuracies` is the share of pairs whose chosen response the policy itself finds
    likelier per token (Chen et al. 2024, arXiv:2405.19534): unlike DPO's rewards, it has a meaning
    before the first step as well.
    """
    margins = pair.chosen_rewards - pair.rejected_rewards
    chosen, rejected = logps.chosen.detach(), logps.rejected.detach()
    chosen_mean = chosen / logps.chosen_lengths.clamp(min=1)
    rejected_mean = rejected / logps.rejected_lengths.clamp(min=1)
    return {
        "loss": pair.losses,
        "rewards/chosen": pair.chosen_rewards,
        "rewards/rejected": pair.rejected_rewards,
        "rewards/accuracies": margins > 0,
        "rewards/margins": margins,
        "logps/chosen": chosen,
        "logps/rejected": rejected,
        "ranking_accuracies": chosen_mean > rejected_mean,
    }


def pair_sums(pair: PairLoss, logps: PairLogps) -> dict[str, Tensor]:
    """What is summed over pairs, (B,) each, by the names of `PAIR_SUMS`.

    Args:
        pair: what the loss says of each pair.
        logps: of the policy, with statistics.
    """
    rows = logps._asdict()
    of_tokens = {name: rows[name] for name in (*_STATISTICS, "chosen_lengths", "rejected_lengths")}
    return {**pair_metrics(pair, logps), "pairs": torch.ones_like(logps.chosen), **of_tokens}


def pair_means(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Means over pairs, and over tokens; 0 where there are none.

    Over the scored tokens of both responses: `entropy` of the predictions, in nats. Of the chosen
    ones: `mean_token_accuracy`, the share of those that are the policy's likeliest. Of each:
    `logits/*`, where the logit of a position is the mean over the vocabulary.

    Args:
        sums: by the names of `PAIR_SUMS`, () each.
    """
    pairs = sums["pairs"].clamp(min=1)
    means = {name: sums[name] / pairs for name in OF_PAIRS}
    for name, parts in OF_TOKENS.items():
        tokens = torch.stack([sums[f"{part.partition('_')[0]}_lengths"] for part in parts]).sum()
        means[name] = torch.stack([sums[part] for part in parts]).sum() / tokens.clamp(min=1)
    return means
