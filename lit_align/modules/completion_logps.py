"""From a batch of labelled completions to what losses read of them: sums over their tokens."""

from typing import NamedTuple

from torch import Tensor, nn

from lit_align.logprobs import Layout, response_logprobs
from lit_align.modules.policy import Batch
from lit_align.ops import completion_lengths


class CompletionLogps(NamedTuple):
    """Log-probs of each row's completion, (B,), nats, summed over its tokens.

    Attributes:
        completion: of the row's own.
        completion_lengths: its scored tokens.
        mismatched: of that of another prompt, behind the row's prompt; None: not asked for.
        mismatched_lengths: its scored tokens.
    """

    completion: Tensor
    completion_lengths: Tensor
    mismatched: Tensor | None = None
    mismatched_lengths: Tensor | None = None

    def sums(self, model: str) -> dict[str, Tensor]:
        """The log-probs by the names that they have if they are those of this model."""
        named = {f"{model}_completion_logps": self.completion}
        if self.mismatched is not None:
            named[f"{model}_mismatched_logps"] = self.mismatched
        return named


def side_logps(
    model: nn.Module, batch: Batch, side: str, layout: Layout = "auto"
) -> tuple[Tensor, Tensor]:
    """Log-probs under a model of the `completion` or the `mismatched` of each row, and lengths."""
    names = ("input_ids", "attention_mask", "labels")
    ids, attention_mask, labels = (batch[f"{side}_{name}"] for name in names)
    scored = response_logprobs(model, ids, attention_mask, labels, layout=layout)
    return scored.logprobs.sum(-1), completion_lengths(labels)
