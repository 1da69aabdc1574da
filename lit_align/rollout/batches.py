"""From samples to the tensors of a micro-batch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_align.ops import IGNORE_INDEX
from lit_align.rollout.plan import Window
from lit_align.rollout.rows import Sample, known

Batch = dict[str, Tensor]


def collate(samples: Sequence[Sample]) -> Batch:
    """Prompt and completion of each sample, padded on the right.

    Args:
        samples: at least one, each with a prompt of at least one token.

    Returns:
        `input_ids`, `attention_mask`, `labels` (B, T) int64; `group` and `number` (B,) int64, by
        which a sample is known; `advantages` (B,) float32; `masked_tokens` (B,) int64, tokens of
        completions that do not count; and of the numbers per token (`PER_TOKEN`) those that all
        samples have, (B, T-1) float32, 0 outside the completion.
    """
    ids = [torch.tensor([*sample.prompt_ids, *sample.completion_ids]) for sample in samples]
    masked = [len(sample.completion_ids) - sample.trained_tokens for sample in samples]
    batch = {
        # Masked positions are read by nothing, so any valid id pads.
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(
            [_labels(row, sample) for row, sample in zip(ids, samples, strict=True)],
            batch_first=True,
            padding_value=IGNORE_INDEX,
        ),
        "group": torch.tensor([sample.group for sample in samples]),
        "number": torch.tensor([sample.number for sample in samples]),
        "masked_tokens": torch.tensor(masked),
        "advantages": torch.tensor([s.advantage for s in samples], dtype=torch.float32),
    }
    for name in known(samples):
        batch[name] = pad_sequence([_aligned(s, name) for s in samples], batch_first=True)
    return batch


def filler(samples: Sequence[Sample]) -> Batch:
    """What a rank without samples is given: the shortest of `samples`, no token of which counts.

    It keeps the ranks in step and adds nothing to gradient and metrics.
    """
    shortest = min(samples, key=lambda sample: sample.length)
    batch = collate([replace(shortest, is_trained=False, advantage=0.0)])
    return {**batch, "masked_tokens": torch.zeros_like(batch["masked_tokens"])}


def window_stamps(window: Window, rank: int) -> list[Batch]:
    """What each micro-batch must know of its whole optimizer-step window to normalise exactly.

    Args:
        window: the samples of each micro-batch and rank.
        rank: whose micro-batches are stamped.

    Returns:
        Per micro-batch `window_tokens` () trained tokens; `window_rows` () completions and
        `window_prompts` () groups with at least one of these; `row_prompt_tokens` (B,) trained
        tokens in the window of each row's group, of a filler's 0; all float32.
    """
    tokens: Counter[int] = Counter()
    rows = 0
    for sample in (sample for shares in window for share in shares for sample in share):
        tokens[sample.group] += sample.trained_tokens
        rows += sample.trained_tokens > 0
    of_window = {
        "window_tokens": _floats(tokens.total()),
        "window_rows": _floats(rows),
        "window_prompts": _floats(sum(count > 0 for count in tokens.values())),
    }
    of_rows = [[tokens[sample.group] for sample in shares[rank]] or [0] for shares in window]
    return [{**of_window, "row_prompt_tokens": _floats(counts)} for counts in of_rows]


def with_window(batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The batches of an optimizer step, of which the first holds all of them under `window`."""
    window = list(batches)
    yield window[0] | {"window": window}
    yield from window[1:]


def _labels(ids: Tensor, sample: Sample) -> Tensor:
    """The ids of the tokens that count, `IGNORE_INDEX` elsewhere, (T,)."""
    labels = torch.full_like(ids, IGNORE_INDEX)
    if sample.is_trained:
        first = len(sample.prompt_ids)
        labels[first:] = ids[first:]
    return labels


def _aligned(sample: Sample, name: str) -> Tensor:
    """Log-probs of the completion at the positions that predict it, (T-1,), 0 before."""
    values = torch.tensor(getattr(sample, name), dtype=torch.float32)
    return torch.cat([values.new_zeros(len(sample.prompt_ids) - 1), values])


def _floats(counts: int | Sequence[int]) -> Tensor:
    return torch.tensor(counts, dtype=torch.float32)
