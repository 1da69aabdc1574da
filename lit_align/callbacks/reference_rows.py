"""The responses that a reference is asked about: each one once, in batches of like length."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from lit_align.callbacks.reference_store import Scored, row_key
from lit_align.losses import TensorCache
from lit_align.ops import IGNORE_INDEX

Row = Mapping[str, Any]
Side = Literal["chosen", "rejected"]
SIDES = get_args(Side)


class Rows(Protocol):
    """Rows with `index`, `prompt_ids`, `chosen_ids` and `rejected_ids`."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Row: ...


class Response(NamedTuple):
    """One response of the data set, without its tokens."""

    key: bytes
    length: int  # tokens of prompt and response
    position: int  # of a row that has it
    side: Side


class Pair(NamedTuple):
    """One row: its `index` in the data set and the keys of its two responses."""

    row: int
    chosen: bytes
    rejected: bytes


@dataclass
class Responses:
    """All responses of some rows; one that several rows share stands here once.

    Args:
        rows: of the data set, in any order.
    """

    rows: Rows
    pairs: list[Pair] = field(default_factory=list)
    by_key: dict[bytes, Response] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position in range(len(self.rows)):
            row = self.rows[position]
            chosen = self._enter(row, position, "chosen")
            self.pairs.append(Pair(row["index"], chosen, self._enter(row, position, "rejected")))

    def _enter(self, row: Row, position: int, side: Side) -> bytes:
        prompt, response = row["prompt_ids"], row[f"{side}_ids"]
        key = row_key(prompt, response)
        self.by_key.setdefault(key, Response(key, len(prompt) + len(response), position, side))
        return key

    def absent_from(self, known: Mapping[bytes, Scored]) -> list[Response]:
        """Responses without an entry, in an order that depends on nothing but their tokens.

        Neighbours are of like length, so that batches carry little padding; the longest come first,
        so that a batch that does not fit into memory fails at once and not after an hour.
        """
        absent = (response for key, response in self.by_key.items() if key not in known)
        return sorted(absent, key=lambda response: (-response.length, response.key))

    def batch(self, responses: Iterable[Response]) -> tuple[Tensor, Tensor, Tensor]:
        """Input ids, attention mask and labels of some responses, padded on the right, (B, T)."""
        ids, labels = [], []
        for response in responses:
            row = self.rows[response.position]
            prompt, tokens = list(row["prompt_ids"]), list(row[f"{response.side}_ids"])
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
        text = tokenizer.decode(row[f"{response.side}_ids"])
        return f"the {response.side} response of row {row['index']}, {text[:60]!r}"

    def cache(
        self, known: Mapping[bytes, Scored], *, average: bool, dtype: torch.dtype
    ) -> TensorCache:
        """Log-probs of both responses by row index: sums, or means per token; nats.

        Rows of the data set that are not among these rows stay NaN, which nobody can look up.
        """
        index = [pair.row for pair in self.pairs]
        columns = {side: [known[getattr(pair, side)] for pair in self.pairs] for side in SIDES}
        tensors = {}
        for side, column in columns.items():
            values = [x.logps / max(x.tokens, 1) if average else x.logps for x in column]
            tensor = torch.full((1 + max(index, default=-1),), torch.nan, dtype=dtype)
            tensor[index] = torch.tensor(values, dtype=dtype)
            tensors[f"{side}_logps"] = tensor
        return TensorCache(tensors)
