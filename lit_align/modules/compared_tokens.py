"""What a loss that compares tokens with all others of an optimizer step is given of completions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_align.logprobs import ResponseLogprobs
from lit_align.modules.policy import Batch, PolicyModule
from lit_align.modules.whole_window import Rows, Windows
from lit_align.ops import completion_mask

Score = Callable[[Batch], ResponseLogprobs]
# What only the policy reads; everything else of a batch says something of its completions.
_READ = {"input_ids", "attention_mask", "labels"}


def compared_tokens(
    module: PolicyModule, windows: Windows, batch: Batch, score: Score, title: str
) -> tuple[Batch, ResponseLogprobs, Tensor]:
    """The completions of the window, those of the batch live, and numbers for the others.

    Args:
        module: in training.
        windows: its.
        batch: a micro-batch.
        score: from a batch to log-probs under the policy.
        title: what messages call the loss.

    Returns:
        As if they were one batch: what the loss reads of each, the log-probs, and which tokens are
        the batch's own, (N, T) bool. Completions without trained tokens are left out.
    """
    rows_of = partial(_rows, score=score)
    counted = completion_mask(batch["labels"]).any(-1)
    windows.look_ahead(module, batch, rows_of, counted, title)
    rows, is_own = windows.around(rows_of(batch))
    scored = ResponseLogprobs._make(rows.get(name) for name in ResponseLogprobs._fields)
    # What is told of no completion, or only summed up.
    others = {n: t for n, t in _tensors(batch).items() if n == "masked_tokens" or not t.dim()}
    return {**rows, **others}, scored, scored.mask & is_own.unsqueeze(-1)


def _rows(batch: Batch, score: Score) -> Rows:
    """Everything that losses read of each completion, and what it is told by."""
    scored = score(batch)._asdict()
    row = torch.arange(len(scored["mask"]), device=scored["mask"].device)
    key = torch.stack([batch.get("group", row), batch.get("number", row)], -1)
    return {
        **{n: t for n, t in _tensors(batch).items() if n not in _READ and t.dim()},
        **{name: values for name, values in scored.items() if values is not None},
        "key": key,
        "is_real": scored["mask"].any(-1),
    }


def _tensors(batch: Any) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, Tensor)}
