"""Rows of a padded batch as one packed sequence without padding, prompts that repeat run once."""

from typing import NamedTuple

import torch
from torch import Tensor

from lit_align.logprobs.attention import Segment, Segments
from lit_align.ops import IGNORE_INDEX

# A shorter prefix is cheaper to run again than to attend to from elsewhere, tokens.
SMALLEST_PREFIX = 16


class Rows(NamedTuple):
    """A batch without what no prediction reads: real tokens to the left, on the CPU.

    `ids` are (B, T); `scored`, (B, T), is true where a token is predicted and the prediction read;
    `inputs`, (B,), counts the tokens that have to be run: all before the last scored one.
    """

    ids: Tensor
    scored: Tensor
    inputs: Tensor


class Prefix(NamedTuple):
    """What a row has in common with an earlier one: its first `length` tokens."""

    row: int
    length: int


class Packed(NamedTuple):
    """Rows in one sequence of S tokens.

    `input_ids` and `position_ids` are (1, S). `sources`, (N,), are the places in the sequence
    whose hidden states predict the N scored tokens, row after row.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Segments
    sources: Tensor


def packable_rows(input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Rows | None:
    """The rows of a batch, or None if padding is to predict something or to be predicted."""
    ids, real, labels = input_ids.cpu(), attention_mask.cpu().bool(), labels.cpu()
    scored = labels != IGNORE_INDEX
    scored[:, :1] = False
    if (scored[:, 1:] & ~(real[:, 1:] & real[:, :-1])).any():
        return None
    to_the_left = (~real).byte().argsort(dim=1, stable=True)
    scored = scored.gather(1, to_the_left)
    inputs = (scored * torch.arange(scored.shape[1])).amax(1)
    if not scored.any():
        # The model has to run all the same: other ranks may wait for it.
        inputs[0] = 1
    return Rows(ids.gather(1, to_the_left), scored, inputs)


def no_prefixes(rows: Rows) -> list[Prefix]:
    """Every row by itself."""
    return [Prefix(row, 0) for row in range(len(rows.ids))]


def shared_prefixes(rows: Rows, smallest: int = SMALLEST_PREFIX) -> list[Prefix]:
    """What each row shares with the first one of the same prompt.

    Responses that begin alike share their beginnings too, so this may be more than the prompt.
    """
    prefixes = no_prefixes(rows)
    prompts = rows.scored.byte().argmax(1).tolist()
    firsts: dict[bytes, int] = {}
    for row, inputs in enumerate(rows.inputs.tolist()):
        if not inputs:
            continue
        first = firsts.setdefault(rows.ids[row, : prompts[row]].numpy().tobytes(), row)
        both = min(inputs, int(rows.inputs[first]))
        same = rows.ids[row, :both] == rows.ids[first, :both]
        length = both if same.all() else int(same.byte().argmin())
        if row != first and length >= smallest:
            prefixes[row] = Prefix(first, length)
    return prefixes


def pack(rows: Rows, prefixes: list[Prefix], device: torch.device) -> Packed:
    """One sequence of all that has to be run.

    Args:
        rows: the rows.
        prefixes: of each row, what an earlier row without a prefix of its own has run already.
        device: where the tensors go.
    """
    places = torch.full_like(rows.ids, -1)  # in the sequence, of each row's tokens
    starts: list[int] = []
    segments = []
    size = 0
    for row, (inputs, (first, shared)) in enumerate(
        zip(rows.inputs.tolist(), prefixes, strict=True)
    ):
        starts.append(size)
        places[row, :shared] = places[first, :shared]
        stop = size + inputs - shared
        places[row, shared:inputs] = torch.arange(size, stop)
        if stop > size:
            segments.append(Segment(size, stop, starts[first], starts[first] + shared))
        size = stop
    run = places >= 0
    ids, positions = torch.empty(2, 1, size, dtype=torch.long)
    ids[0, places[run]] = rows.ids[run]
    positions[0, places[run]] = torch.arange(places.shape[1]).expand_as(places)[run]
    sources = places[:, :-1][rows.scored[:, 1:]]
    return Packed(ids.to(device), positions.to(device), Segments(segments), sources.to(device))
