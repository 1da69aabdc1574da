"""How many tokens a batch runs through a model, and batches cut by that."""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from lit_align.logprobs.abilities import abilities
from lit_align.logprobs.layouts import WORTHWHILE, Layout
from lit_align.logprobs.packing import SMALLEST_PREFIX


class Item(NamedTuple):
    """Rows that stay together in a batch: responses to one prompt.

    Attributes:
        prompt: equal for items of the same prompt.
        prompt_tokens: its length.
        responses: tokens of each of them, at least one.
    """

    prompt: Hashable
    prompt_tokens: int
    responses: tuple[int, ...]


class Ways(NamedTuple):
    """How a batch can go through a model.

    Attributes:
        packs: without padding.
        shares: that, and a prompt that repeats is run once.
        chooses: whether a batch stays padded all the same if that is about as cheap.
    """

    packs: bool
    shares: bool
    chooses: bool


def ways(model: nn.Module, layout: Layout) -> Ways:
    """What a layout comes to for a model at this moment; on all ranks at the same call."""
    packs = layout != "padded" and abilities(model).pack()
    shares = packs and layout != "packed" and abilities(model).share()
    return Ways(packs, shares, layout == "auto")


@dataclass
class Load:
    """What a batch runs, as it grows.

    Attributes:
        ways: of the model.
        rows: responses.
        longest: tokens of the longest of them with its prompt.
    """

    ways: Ways
    rows: int = 0
    longest: int = 0
    _packed: int = 0
    _prompts: set[Hashable] = field(default_factory=set)

    def add(self, item: Item) -> None:
        self.rows += len(item.responses)
        self.longest = max(self.longest, item.prompt_tokens + max(item.responses))
        self._packed += self._grows_by(item)
        self._prompts.add(item.prompt)

    @property
    def tokens(self) -> int:
        """That go through the model."""
        return self._run(self.rows, self.longest, self._packed)

    def tokens_with(self, item: Item) -> int:
        """The same if an item were added."""
        return self._run(
            self.rows + len(item.responses),
            max(self.longest, item.prompt_tokens + max(item.responses)),
            self._packed + self._grows_by(item),
        )

    def _grows_by(self, item: Item) -> int:
        prompts = len(item.responses)
        if self.ways.shares and item.prompt_tokens >= SMALLEST_PREFIX:
            prompts = int(item.prompt not in self._prompts)
        # The last token of a response is predicted and never read.
        return prompts * item.prompt_tokens + sum(item.responses) - len(item.responses)

    def _run(self, rows: int, longest: int, packed: int) -> int:
        stays = self.ways.chooses and packed > WORTHWHILE * rows * (longest - 1)
        return packed if self.ways.packs and not stays else rows * longest


def fill(
    items: Sequence[Item], ways: Ways, most_tokens: int, most_rows: int | None = None
) -> list[range]:
    """Batches of neighbours, each as full as it may be.

    Args:
        items: in the order in which they are to be taken.
        ways: of the model.
        most_tokens: that a batch runs, prompts and responses together; an item of more has a batch
            of its own.
        most_rows: responses of a batch; None: no limit.

    Returns:
        Of each batch the places of its items.
    """
    batches: list[range] = []
    load, first = Load(ways), 0
    for place, item in enumerate(items):
        rows = load.rows + len(item.responses)
        too_many = most_rows is not None and rows > most_rows
        if place > first and (too_many or load.tokens_with(item) > most_tokens):
            batches.append(range(first, place))
            load, first = Load(ways), place
        load.add(item)
    return [*batches, range(first, len(items))] if items else []


def balance(
    items: Sequence[Item], ways: Ways, batches: int, most_rows: int | None = None
) -> list[range]:
    """So many batches of neighbours, of which the largest runs as few tokens as possible.

    Args:
        items: in the order in which they are to be taken.
        ways: of the model.
        batches: how many; fewer only where there are fewer items.
        most_rows: responses of a batch, which must suffice for all; None: no limit.

    Returns:
        Of each batch the places of its items.
    """
    if not items:
        return []
    everything = tokens_of(items, ways)
    smallest = bisect_left(
        range(everything),
        x=True,
        key=lambda tokens: len(fill(items, ways, tokens, most_rows)) <= batches,
    )
    found = fill(items, ways, smallest, most_rows)
    while len(found) < min(batches, len(items)):
        # A batch fewer would not have room, and yet one is left over.
        number = max(
            (n for n, places in enumerate(found) if len(places) > 1),
            key=lambda n: tokens_of([items[place] for place in found[n]], ways),
        )
        places = found[number]
        middle = len(places) // 2
        found[number : number + 1] = [places[:middle], places[middle:]]
    return found


def tokens_of(items: Sequence[Item], ways: Ways) -> int:
    """That go through the model if items are run as one batch."""
    load = Load(ways)
    for item in items:
        load.add(item)
    return load.tokens
