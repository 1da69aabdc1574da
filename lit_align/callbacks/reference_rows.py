"""The responses that a reference is asked about: each one once, those of a prompt together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from lit_align.callbacks.reference_store import Scored, row_key
from lit_align.logprobs import Item, Ways, fill
from lit_align.losses import TensorCache
from lit_align.ops import IGNORE_INDEX

Row = Mapping[str, Any]
SIDES = ("chosen", "rejected")


class Rows(Protocol):
    """Rows with `index`, `prompt_ids`, and `*_ids` of each side, such as `chosen_ids`."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Row: ...


class Response(NamedTuple):
    """One response of the data set, or its first tokens, without the tokens themselves."""

    key: bytes
    length: int  # tokens of prompt and response
    position: int  # of a row that has it
    side: str
    tokens: int  # of the response
    prompt: bytes  # equal for equal prompts

    @property
    def item(self) -> Item:
        """What it adds to a batch."""
        return Item(self.prompt, self.length - self.tokens, (self.tokens,))


class Pair(NamedTuple):
    """One row: its `index` in the data set, and what is asked about it, by the cache's names."""

    row: int
    keys: Mapping[str, bytes]


@dataclass
class Responses:
    """All responses of some rows; one that several rows share stands here once.

    Args:
        rows: of the data set, in any order.
        sides: the responses of a row, by name.
        heads: whether each response is wanted as far as the other one of its row goes, as well.
            Such a head is a response like any other, which another row may have as it is.
    """

    rows: Rows
    sides: Sequence[str] = SIDES
    heads: bool = False
    pairs: list[Pair] = field(default_factory=list)
    by_key: dict[bytes, Response] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position in range(len(self.rows)):
            row = self.rows[position]
            keys = {name: self._enter(row, position, name) for name in self.names}
            self.pairs.append(Pair(row["index"], keys))

    def _enter(self, row: Row, position: int, name: str) -> bytes:
        side = name.partition("_")[0]
        lengths = {each: len(row[f"{each}_ids"]) for each in self.sides}
        tokens = min(lengths.values()) if "head" in name else lengths[side]
        prompt, response = row["prompt_ids"], row[f"{side}_ids"][:tokens]
        key = row_key(prompt, response)
        length = len(prompt) + tokens
        if key not in self.by_key:
            self.by_key[key] = Response(key, length, position, side, tokens, row_key(prompt, ()))
        return key

    @property
    def names(self) -> list[str]:
        """What is asked of each row, by the names that the cache gives it."""
        kinds = ("logps", "head_logps") if self.heads else ("logps",)
        return [f"{side}_{kind}" for side in self.sides for kind in kinds]

    def absent_from(self, known: Mapping[bytes, Scored]) -> list[Response]:
        """Responses without an entry, in an order that depends on nothing but their tokens.

        Those of a prompt follow each other, and neighbours are of like length; the longest come
        first, so that a batch that does not fit into memory fails at once and not after an hour.
        """
        absent = [response for key, response in self.by_key.items() if key not in known]
        longest: dict[bytes, int] = {}
        for response in absent:
            longest[response.prompt] = max(response.length, longest.get(response.prompt, 0))

        def place(response: Response) -> tuple[int, bytes, int, bytes]:
            return -longest[response.prompt], response.prompt, -response.length, response.key

        return sorted(absent, key=place)

    def batch(self, responses: Iterable[Response]) -> tuple[Tensor, Tensor, Tensor]:
        """Input ids, attention mask and labels of some responses, padded on the right, (B, T)."""
        ids, labels = [], []
        for response in responses:
            row = self.rows[response.position]
            prompt = list(row["prompt_ids"])
            tokens = list(row[f"{response.side}_ids"][: response.tokens])
            ids.append(torch.tensor(prompt + tokens))
            labels.append(torch.tensor([IGNORE_INDEX] * len(prompt) + tokens))
        mask = [torch.ones_like(row) for row in ids]
        # Masked positions are read by nothing, so any valid id pads.
        return (
            pad_sequence(ids, batch_first=True),
            pad_sequence(mask, batch_first=True),
            pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
        )

    def name(self, response: Response, tokenizer: PreTrainedTokenizerBase) -> str:
        """The words by which a person finds a response: its row's index and how it begins."""
        row = self.rows[response.position]
        text = tokenizer.decode(row[f"{response.side}_ids"][: response.tokens])
        return f"the {response.side} response of row {row['index']}, {text[:60]!r}"

    def cache(self, known: Mapping[bytes, Scored], dtype: torch.dtype) -> TensorCache:
        """Log-probs of all that was asked by row index: sums over tokens, nats.

        Rows of the data set that are not among these rows stay NaN, which nobody can look up.
        """
        index = [pair.row for pair in self.pairs]
        tensors = {}
        for name in self.names:
            values = [known[pair.keys[name]].logps for pair in self.pairs]
            tensor = torch.full((1 + max(index, default=-1),), torch.nan, dtype=dtype)
            tensor[index] = torch.tensor(values, dtype=dtype)
            tensors[name] = tensor
        return TensorCache(tensors)


def cut(
    responses: Sequence[Response], ways: Ways, most_tokens: int, most_rows: int | None = None
) -> list[list[Response]]:
    """Batches of responses, in their order; those of a prompt stay together where they fit.

    Args:
        responses: those of a prompt follow each other.
        ways: of the model that is asked.
        most_tokens: that a batch runs; a response of more has one of its own.
        most_rows: responses of a batch; None: no limit.
    """
    parts = [
        [responses[place] for place in places]
        for responses in (list(group) for _, group in groupby(responses, attrgetter("prompt")))
        for places in fill([each.item for each in responses], ways, most_tokens, most_rows)
    ]
    items = [
        part[0].item._replace(responses=tuple(response.tokens for response in part))
        for part in parts
    ]
    return [
        [response for place in places for response in parts[place]]
        for places in fill(items, ways, most_tokens, most_rows)
    ]
