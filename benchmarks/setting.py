"""What all rows of the table are measured with: the model, the text, how much of it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from paired import Spread
from text import Group, Pair, Span, Text
from transformers import PreTrainedTokenizerBase

from lit_align.matmul import choose_matmul


@dataclass(frozen=True)
class Sizes:
    """How much text each row of the table takes, in tokens where nothing else is said.

    Attributes:
        prompt: of a pair.
        answer: of a pair.
        group_prompt: of a GRPO prompt.
        completion: of its completions.
        asked_prompt: of a prompt to generate from.
        new_tokens: to generate.
        loop_steps: optimizer steps of a whole loop.
        reference_pairs: that the reference is asked about.
        tokenised_pairs: conversations to tokenise.
        scaling: lengths of both answers, from short rows to long.
    """

    prompt: Span = (256, 512)
    answer: Span = (64, 256)
    group_prompt: Span = (256, 256)
    completion: Span = (64, 128)
    asked_prompt: Span = (96, 256)
    new_tokens: int = 32
    loop_steps: int = 20
    reference_pairs: int = 16
    tokenised_pairs: int = 100
    scaling: tuple[int, ...] = (32, 64, 128, 256, 512)


FULL = Sizes()
# That everything runs, and nothing about speed.
QUICK = Sizes(
    prompt=(8, 12),
    answer=(3, 6),
    group_prompt=(8, 8),
    completion=(3, 6),
    asked_prompt=(6, 9),
    new_tokens=4,
    loop_steps=2,
    reference_pairs=4,
    tokenised_pairs=4,
    scaling=(2, 4),
)


@dataclass(frozen=True)
class Setting:
    """What a row is measured with.

    Attributes:
        model: float32; rows put `twin`s of it to work.
        tokenizer: its own.
        sizes: of the text.
        rounds: of each comparison.
        program: arguments that make a fresh process measure with the same setting.
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    sizes: Sizes = FULL
    rounds: int = 5
    program: tuple[str, ...] = ()

    def pairs(self, number: int, seed: int) -> list[Pair]:
        return Text(self.tokenizer, seed).pairs(number, self.sizes.prompt, self.sizes.answer)

    def groups(self, number: int, seed: int) -> list[Group]:
        sizes = self.sizes
        text = Text(self.tokenizer, seed)
        return text.groups(number, 8, sizes.group_prompt, sizes.completion)

    def few(self) -> tuple[list[Pair], list[Group]]:
        """A small pair and a small group, to warm up on."""
        text = Text(self.tokenizer, 0)
        return text.pairs(1, (8, 12), (4, 6)), text.groups(1, 8, (8, 12), (4, 6))


class Check(NamedTuple):
    """A difference that must stay within a bound for the times to mean anything."""

    what: str
    value: float
    bound: float

    @property
    def holds(self) -> bool:
        # Written so that NaN fails it.
        return self.value <= self.bound


@dataclass
class Found:
    """What a row says: numbers against each baseline, by its name, and what stands behind them."""

    numbers: dict[str, Spread]
    checks: list[Check]
    details: dict[str, str]


Measured = Callable[[Setting], Found]


def with_matmul(
    choice: str, *contexts: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], AbstractContextManager[Any]]:
    """A context in which float32 matrices are multiplied by this choice, inside others."""

    @contextmanager
    def around() -> Any:
        choose_matmul(choice)
        try:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context())
                yield
        finally:
            choose_matmul("default")

    return around
