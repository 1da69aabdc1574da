"""Decoding with each prompt's keys and values held once, whatever the number of its completions.

The rows of a step are single tokens. Attention has two parts under one softmax: to the prompt,
where all completions of a prompt and all heads that read the same keys are one matrix product, and
to the row's own tokens, which are written in place.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_align.logprobs.attention import Segment, Segments
from lit_align.rollout.forward import Forward

# Tokens by which the room for a row's own tokens grows.
GROWTH = 64
# What attention is told that matters not here, or is heeded.
HEEDED = {"dropout", "position_ids", "scaling", "segments", "sliding_window"}


class States(NamedTuple):
    """Keys and values of some tokens: (K, R, T, D) of K heads and R rows."""

    keys: Tensor
    values: Tensor

    def of(self, rows: Tensor) -> "States":
        """Those of these rows."""
        return States(self.keys[:, rows], self.values[:, rows])


class OwnStates:
    """Keys and values of what rows have of their own: room for more tokens than there are."""

    def __init__(self, states: States) -> None:
        self._states = states

    def add(self, states: States, number: int) -> States:
        """Let these, (K, R, D), be the states of token `number`; all up to it."""
        if number == self._states.keys.shape[2]:
            self._states = States(*(_with_room(held) for held in self._states))
        for held, new in zip(self._states, states, strict=True):
            held[:, :, number] = new
        return States(*(held[:, :, : number + 1] for held in self._states))

    def of(self, rows: Tensor) -> "OwnStates":
        """Those of these rows."""
        return OwnStates(self._states.of(rows))


class Seats:
    """Rows of several prompts as a rectangle: prompts by the number of rows that most have.

    Args:
        owners: which prompt each row is of, (N,), ascending, on the CPU.
        device: where rows are taken from.

    Attributes:
        prompts: those that have a row, (R,).
        owners: of each row, its place among `prompts`, (N,).
    """

    def __init__(self, owners: Tensor, device: torch.device) -> None:
        self.prompts, self.owners, counts = torch.unique(
            owners, return_inverse=True, return_counts=True
        )
        ends, width = counts.cumsum(0), int(counts.max())
        starts = ends - counts
        rows = starts.unsqueeze(-1) + torch.arange(width)
        # A seat that is left over is taken by a row that has one.
        rows = torch.minimum(rows, ends.unsqueeze(-1) - 1).flatten()
        seats = self.owners * width + torch.arange(len(owners)) - starts[self.owners]
        self._all_taken = len(rows) == len(owners)
        self._rows, self._seats = rows.to(device), seats.to(device)

    def seat(self, rows: Tensor) -> Tensor:
        """(N, ...) to (R * W, ...)."""
        return rows if self._all_taken else rows[self._rows]

    def unseat(self, seats: Tensor) -> Tensor:
        """(R * W, ...) to (N, ...)."""
        return seats if self._all_taken else seats[self._seats]

    def moved(self, rows: Tensor, seats: "Seats") -> Tensor:
        """On which seats the rows sit here that sit on others there, (R' * W',)."""
        moved: Tensor = self._seats[rows][seats._rows]
        return moved


class Branches:
    """Rows in the middle of decoding, of which those of a prompt share its keys and values.

    Attributes:
        logits: what follows each row, (N, V).
    """

    def __init__(
        self,
        logits: Tensor,
        positions: Tensor,  # of the next token of each row, (N, 1)
        seats: Seats,
        lengths: Tensor,  # of each prompt, tokens, (R,)
        prompts: dict[int, States],  # of each layer
        own: dict[int, OwnStates],
        length: int,  # tokens of its own that each row has
    ) -> None:
        self.logits = logits
        self._positions = positions
        self._seats = seats
        self._lengths = lengths
        self._prompts = prompts
        self._own = own
        self._length = length
        places = torch.arange(int(lengths.max()), device=lengths.device)
        ended = (places >= lengths.unsqueeze(-1)).unsqueeze(1)
        self._bias = torch.zeros_like(ended, dtype=logits.dtype).masked_fill(ended, -torch.inf)

    def rows(self, index: Tensor) -> "Branches":
        """See `Batch`."""
        seats = Seats(self._seats.owners[index.cpu()], self.logits.device)
        lengths, prompts = _of_prompts(self._lengths, self._prompts, seats)
        index = index.to(self.logits.device)
        moved = self._seats.moved(index, seats)
        own = {layer: states.of(moved) for layer, states in self._own.items()}
        positions = self._positions[index]
        return Branches(self.logits[index], positions, seats, lengths, prompts, own, self._length)

    def step(self, forward: Forward, tokens: Tensor, done: Tensor) -> "Branches":
        """See `Batch`; it is `self` that goes on."""
        ids = tokens.to(forward.device).unsqueeze(-1)
        self.logits = forward.remembering(ids, self._positions, 1, memory=self)[:, -1]
        self._positions = self._positions + (~done).long().to(forward.device).unsqueeze(-1)
        self._length += 1
        return self

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """See `Memory`; the batch is the rows with one token each."""
        rows, heads, _, width = query.shape
        kv_heads = key.shape[1]
        seat = self._seats.seat
        grouped = seat(query.view(rows, kv_heads, heads // kv_heads, width)).transpose(0, 1)
        new = States(*(seat(states[:, :, 0]).transpose(0, 1) for states in (key, value)))
        if layer not in self._own:
            self._own[layer] = OwnStates(States(*(x.unsqueeze(2)[:, :, :0] for x in new)))
        output = attention(
            grouped * (options.get("scaling") or width**-0.5),
            self._prompts[layer],
            self._own[layer].add(new, self._length),
            self._bias.to(query.dtype),
        )
        output = self._seats.unseat(output.transpose(0, 1))
        return output.reshape(rows, 1, heads, -1)


class Prompts:
    """Prompts that have been run, one row each: a batch before the first tokens.

    Attributes:
        logits: what follows each prompt, (R, V).
        windows: how many tokens layers reach back, those that do not reach everything.
        unknown: names of what layers' attention is told and is not heeded here.
    """

    def __init__(self, forward: Forward, prompts: Sequence[Sequence[int]]) -> None:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ends = lengths.cumsum(0)
        starts = ends - lengths
        places = starts.unsqueeze(-1) + torch.arange(int(lengths.max()))
        # Beyond the end of a prompt there may be any other's: nothing attends to that.
        self._places = places.clamp(max=int(ends[-1]) - 1).to(forward.device)
        self._lengths = lengths.to(forward.device)
        self._states: dict[int, States] = {}
        self.windows: set[int] = set()
        self.unknown: set[str] = set()
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        ids = torch.tensor([token for prompt in prompts for token in prompt])
        positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
        self.logits = forward.remembering(
            ids.unsqueeze(0).to(forward.device),
            positions.unsqueeze(0).to(forward.device),
            (ends - 1).to(forward.device),
            memory=self,
            segments=Segments([Segment(*span) for span in spans]),
        )[0]

    def copied(self) -> "Prompts":
        """See `Begun`; rows take nothing away."""
        return self

    def rows(self, index: Tensor) -> Branches:
        """See `Begun`."""
        seats = Seats(index.cpu(), self.logits.device)
        lengths, prompts = _of_prompts(self._lengths, self._states, seats)
        index = index.to(self.logits.device)
        positions = self._lengths[index].unsqueeze(-1)
        return Branches(self.logits[index], positions, seats, lengths, prompts, {}, 0)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> None:
        """See `Memory`; the batch is all prompts in one sequence, which is attended to as ever."""
        self._states[layer] = States(*(x[0][:, self._places] for x in (key, value)))
        told = {name for name, value in options.items() if value is not None and value is not False}
        self.unknown |= told - HEEDED
        if "sliding_window" in told:
            self.windows.add(options["sliding_window"])


def attention(query: Tensor, prompts: States, own: States, bias: Tensor) -> Tensor:
    """Attention to prompts and to own tokens, under one softmax.

    Args:
        query: scaled, (K, S, G, D): K heads of keys, the S = R * W seats of R prompts, G heads of
            queries for each head of keys.
        prompts: R rows of P tokens.
        own: S rows of T tokens.
        bias: 0 where a prompt has a token, and minus infinity where it has none, (R, 1, P).

    Returns:
        (K, S, G, D), D that of the values.
    """
    kv_heads, seats, group, _ = query.shape
    number, width = prompts.keys.shape[1:3]
    query = query.contiguous()
    to_prompts = torch.baddbmm(
        bias.repeat(kv_heads, 1, 1),
        query.view(kv_heads * number, -1, query.shape[-1]),
        prompts.keys.flatten(0, 1).transpose(1, 2),
    ).view(kv_heads * seats, group, width)
    to_own = torch.bmm(query.flatten(0, 1), own.keys.flatten(0, 1).transpose(1, 2))
    # Sums over low precision lose digits.
    weights = torch.cat([to_prompts, to_own], -1).softmax(-1, torch.float32).to(own.values.dtype)
    of_prompts = torch.bmm(
        weights[..., :width].view(kv_heads * number, -1, width), prompts.values.flatten(0, 1)
    ).view(kv_heads * seats, group, -1)
    output = torch.baddbmm(of_prompts, weights[..., width:], own.values.flatten(0, 1))
    return output.view(kv_heads, seats, group, -1)


def _with_room(states: Tensor) -> Tensor:
    """The same with room for more tokens, (K, R, T, D)."""
    heads, rows, _, width = states.shape
    return torch.cat([states, states.new_empty(heads, rows, GROWTH, width)], 2)


def _of_prompts(
    lengths: Tensor, states: dict[int, States], seats: Seats
) -> tuple[Tensor, dict[int, States]]:
    """Lengths and states of the prompts that still have a row."""
    if len(seats.prompts) == len(lengths):
        return lengths, states
    index = seats.prompts.to(lengths.device)
    lengths = lengths[index]
    longest = int(lengths.max())
    cut = {
        layer: States(*(x[:, :, :longest] for x in held.of(index)))
        for layer, held in states.items()
    }
    return lengths, cut
