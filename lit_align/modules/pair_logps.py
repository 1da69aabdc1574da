"""From a batch of pairs to what losses read of them: one forward pass, and sums over its tokens."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_align.logprobs import Layout, ResponseLogprobs, response_logprobs
from lit_align.losses import PairConfig
from lit_align.modules.policy import Batch
from lit_align.ops import IGNORE_INDEX, completion_mask, masked_sum


class PairLogps(NamedTuple):
    """Log-probs of both responses of each pair, (B,), nats, summed over response tokens.

    What no term of the loss reads is None, and so are, if not asked for, the statistics that are
    only logged: `*_entropy`, `*_mean_logit` and `*_likeliest`, sums as well.

    Attributes:
        chosen: of the preferred response.
        rejected: of the other one.
        chosen_lengths: scored tokens of the preferred response.
        rejected_lengths: scored tokens of the other one.
        chosen_alignment: alignment terms of WPO over the preferred response.
        rejected_alignment: the same over the other one.
        prompt: of the tokens of the preferred row that are of no response.
        prompt_lengths: how many those are, but for the first, which nothing predicts.
        chosen_head: of the preferred response as far as the other one goes.
        rejected_head: of the other one as far as the preferred one goes.
        chosen_entropy: entropy of the predictions of the preferred response.
        rejected_entropy: of those of the other one.
        chosen_mean_logit: means over the vocabulary of the logits, of the preferred response.
        rejected_mean_logit: of the other one.
        chosen_likeliest: tokens of the preferred response that are the model's likeliest.
        rejected_likeliest: of the other one.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_lengths: Tensor
    rejected_lengths: Tensor
    chosen_alignment: Tensor | None = None
    rejected_alignment: Tensor | None = None
    prompt: Tensor | None = None
    prompt_lengths: Tensor | None = None
    chosen_head: Tensor | None = None
    rejected_head: Tensor | None = None
    chosen_entropy: Tensor | None = None
    rejected_entropy: Tensor | None = None
    chosen_mean_logit: Tensor | None = None
    rejected_mean_logit: Tensor | None = None
    chosen_likeliest: Tensor | None = None
    rejected_likeliest: Tensor | None = None

    def sums(self, model: str) -> dict[str, Tensor]:
        """The log-probs by the names that losses give them if they are those of this model."""
        return _there(
            {
                f"{model}_chosen_logps": self.chosen,
                f"{model}_rejected_logps": self.rejected,
                f"{model}_prompt_logps": self.prompt,
                f"{model}_chosen_head_logps": self.chosen_head,
                f"{model}_rejected_head_logps": self.rejected_head,
            }
        )

    def tensors(self) -> dict[str, Tensor]:
        """What losses read beside the log-probs, by the names they give it."""
        return _there(
            {
                "chosen_lengths": self.chosen_lengths,
                "rejected_lengths": self.rejected_lengths,
                "prompt_lengths": self.prompt_lengths,
                "chosen_alignment_logps": self.chosen_alignment,
                "rejected_alignment_logps": self.rejected_alignment,
            }
        )

    def per_token(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same, sums over whole responses made means; of an empty response 0."""
        lengths = {"chosen_logps": self.chosen_lengths, "rejected_logps": self.rejected_lengths}
        counts = {name: lengths.get(name.partition("_")[2]) for name in sums}
        return {
            name: total if (count := counts[name]) is None else total / count.clamp(min=1)
            for name, total in sums.items()
        }


def pair_logps(
    model: nn.Module,
    batch: Batch,
    config: PairConfig,
    layout: Layout = "auto",
    *,
    statistics: bool = False,
) -> PairLogps:
    """Log-probs of both responses under a model, what else the loss reads, and maybe statistics.

    Both halves share one forward pass: FSDP then gathers the weights once, not twice.
    """
    input_ids, attention_mask, labels = stacked_pairs(batch)
    reads_prompt = config.reads_prompt
    asked = with_prompts(input_ids, attention_mask, labels) if reads_prompt else labels
    scored = response_logprobs(
        model,
        input_ids,
        attention_mask,
        asked,
        alignment=config.alignment_kind,
        statistics=statistics,
        layout=layout,
    )
    mask = completion_mask(labels) if reads_prompt else scored.mask
    logps = PairLogps(*masked_sum(scored.logprobs, mask).chunk(2), *mask.sum(-1).chunk(2))
    if scored.alignment is not None:
        chosen, rejected = masked_sum(scored.alignment, mask).chunk(2)
        logps = logps._replace(chosen_alignment=chosen, rejected_alignment=rejected)
    if reads_prompt:
        prompt = scored.mask & ~mask
        of_chosen, _ = masked_sum(scored.logprobs, prompt).chunk(2)
        logps = logps._replace(prompt=of_chosen, prompt_lengths=prompt.sum(-1).chunk(2)[0])
    if config.reads_heads:
        chosen, rejected = masked_sum(scored.logprobs, head_mask(mask)).chunk(2)
        logps = logps._replace(chosen_head=chosen, rejected_head=rejected)
    return logps._replace(**_statistics(scored, mask)) if statistics else logps


def _statistics(scored: ResponseLogprobs, mask: Tensor) -> dict[str, Tensor]:
    """What is only logged, by the names of `PairLogps`, (B,) each."""
    assert scored.entropy is not None
    assert scored.mean_logit is not None
    assert scored.is_likeliest is not None
    values = torch.stack([scored.entropy, scored.mean_logit, scored.is_likeliest]).detach()
    sides = masked_sum(values, mask.expand_as(values)).chunk(2, dim=-1)
    return {
        f"{side}_{name}": row
        for side, rows in zip(("chosen", "rejected"), sides, strict=True)
        for name, row in zip(("entropy", "mean_logit", "likeliest"), rows, strict=True)
    }


def stacked_pairs(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen above rejected, padded to one width: input_ids, attention_mask, labels, (2B, T)."""
    width = max(batch["chosen_labels"].shape[1], batch["rejected_labels"].shape[1])

    def stacked(name: str, filler: int) -> Tensor:
        halves = (batch[f"chosen_{name}"], batch[f"rejected_{name}"])
        return torch.cat([F.pad(half, (0, width - half.shape[1]), value=filler) for half in halves])

    # Masked positions are read by nothing, so any valid id pads.
    return stacked("input_ids", 0), stacked("attention_mask", 0), stacked("labels", IGNORE_INDEX)


def with_prompts(input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
    """Labels of stacked pairs in which all real tokens of the chosen rows are to be scored.

    The two rows of a pair have one prompt: that of the chosen one is enough.
    """
    is_chosen = (torch.arange(len(labels), device=labels.device) < len(labels) // 2).unsqueeze(-1)
    return labels.where(~(is_chosen & attention_mask.bool()), input_ids)


def head_mask(mask: Tensor) -> Tensor:
    """Of the scored tokens of stacked pairs as many as both responses have, from the first on.

    Args:
        mask: the scored tokens, chosen above rejected, (2B, T) bool.

    Returns:
        The mask without those of the longer response that the shorter has no token beside.
    """
    chosen, rejected = mask.sum(-1).chunk(2)
    shared = torch.minimum(chosen, rejected).repeat(2).unsqueeze(-1)
    return mask & (mask.cumsum(-1) <= shared)


def _there(named: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named.items() if tensor is not None}
