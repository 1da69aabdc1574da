"""Prompts to answer: a text or a conversation, its token ids, and what rewards need to judge it.

Every column of a row that does not make the prompt is kept by its name: rewards are functions of
columns, and which ones is theirs to say.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from os import PathLike
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from datasets import Dataset
from lightning.pytorch.utilities import rank_zero_info
from transformers import PreTrainedTokenizerBase

from lit_align.data.cache import digest
from lit_align.data.preparation import with_progress
from lit_align.data.prompt_format import PromptFormat, PromptRow, PromptTokeniser
from lit_align.data.rows import Message, RowError
from lit_align.data.sources import Columns, Listed, RowSource, Table, open_source
from lit_align.errors import UserError

PromptSource: TypeAlias = RowSource | Sequence[Mapping[str, Any]] | Dataset | str | PathLike[str]


class Prompt(NamedTuple):
    """What the policy is to answer.

    A tuple and no frozen data class: Lightning takes batches apart on their way to the device,
    and refuses what it cannot put together again.

    Attributes:
        row: its number in the data, from 0; rows that were left out count.
        prompt: as rewards see it: a text, or the messages of a conversation.
        ids: token ids, as the policy reads them; at least one.
        columns: all other columns of the data, JSON values; the same names for every prompt.
    """

    row: int
    prompt: str | list[Message]
    ids: list[int]
    columns: dict[str, Any]


class PromptRows:
    """Prompts by number.

    Args:
        prompts: at least one.
        name: what messages call the data.
    """

    def __init__(self, prompts: Sequence[Prompt], name: str = "prompts") -> None:
        self.prompts = prompts
        self.name = name

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, position: int) -> Prompt:
        return self.prompts[position]

    def select(self, positions: Sequence[int]) -> "PromptRows":
        """Some of them, in the order given."""
        return PromptRows([self.prompts[position] for position in positions], self.name)

    @cached_property
    def fingerprint(self) -> str:
        """Identity of the prompts and their columns, in this order; equal in every process."""
        return digest(prompts=[[prompt.ids, prompt.columns] for prompt in self.prompts])


def open_prompts(
    source: PromptSource,
    tokenizer: PreTrainedTokenizerBase,
    how: PromptFormat | None = None,
    *,
    split: str = "train",
    max_rows: int | None = None,
) -> PromptRows:
    """The prompts of a file, a folder, a data set on the hub or a task.

    One line tells how many there are, and what was left out for which reason.

    Args:
        source: a path or name, as `open_source` takes it; or a task, or whatever else yields rows;
            or rows themselves, a list of dictionaries or a `datasets.Dataset`.
        tokenizer: of the policy.
        how: rows become prompts; None: as the defaults say.
        split: of a folder or hub data set.
        max_rows: keep only this many prompts, and read no further.

    Raises:
        UserError: for a row that cannot be used, or if no prompt is left.
    """
    how = how or PromptFormat()
    source = _opened(source, split, Columns(required=(how.prompt_column,)))
    reading = _Reading(source, PromptTokeniser(tokenizer, how))
    prompts = list(islice(reading.prompts(), max_rows))
    if not prompts:
        raise UserError(f"{source.name}: {reading.tally.why_nothing_is_left()}")
    rank_zero_info(f"{source.name}: {reading.tally.describe(prompts)}")
    return PromptRows(_with_all_columns(prompts), source.name)


def _opened(source: PromptSource, split: str, columns: Columns) -> RowSource:
    """Whatever rows were given as."""
    if isinstance(source, str | PathLike):
        return open_source(source, split, columns)
    if isinstance(source, Dataset):
        return Table("the data set given", source, columns)
    return Listed(source) if isinstance(source, Sequence) else source


@dataclass
class _Tally:
    """What became of the rows read so far."""

    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    skipped: list[str] = field(default_factory=list)

    def describe(self, prompts: Sequence[Prompt]) -> str:
        """One line for people."""
        chats = sum(isinstance(prompt.prompt, list) for prompt in prompts)
        kinds = {0: "plain texts", len(prompts): "conversations"}
        kind = kinds.get(chats, f"{chats} of them conversations")
        lengths = [len(prompt.ids) for prompt in prompts]
        tokens = f"tokens median {median(lengths):g}, max {max(lengths)}"
        return "; ".join([f"{len(prompts)} prompts of {self.rows} rows, {kind}", *self.out, tokens])

    def why_nothing_is_left(self) -> str:
        if not self.rows:
            return "it has no rows"
        return f"no prompt is left of {self.rows} rows: {'; '.join(self.out)}"

    @property
    def out(self) -> list[str]:
        """What was left out."""
        parts = [f"dropped {count} {reason}" for reason, count in self.dropped.most_common()]
        if self.skipped:
            parts.append(f"skipped {len(self.skipped)} bad (first: {self.skipped[0]})")
        return parts


class _Reading:
    """One pass over a source."""

    def __init__(self, source: RowSource, tokenise: PromptTokeniser) -> None:
        self.source = source
        self.tokenise = tokenise
        self.tally = _Tally()

    def prompts(self) -> Iterator[Prompt]:
        """Those to keep; the others are counted."""
        for place, raw in with_progress(iter(self.source), f"Tokenising {self.source.name}"):
            self.tally.rows += 1
            try:
                prompt = self._prompt(place, raw)
            except RowError as error:
                self._refuse(place, error)
                continue
            if reason := self._drop_reason(prompt):
                self.tally.dropped[reason] += 1
            else:
                yield prompt

    def _prompt(self, place: str, raw: object) -> Prompt:
        row = self.tokenise.how.read(raw)
        self._check_template(place, row)
        prompt, ids = self.tokenise(row)
        return Prompt(self.tally.rows - 1, prompt, ids, row.columns)

    def _drop_reason(self, prompt: Prompt) -> str | None:
        most = self.tokenise.how.max_prompt_length
        if not prompt.ids:
            return "empty"
        return f"longer than {most} tokens" if most and len(prompt.ids) > most else None

    def _refuse(self, place: str, error: RowError) -> None:
        if self.tokenise.how.on_bad_row == "raise":
            raise UserError(
                f"{self.source.name}, {place}: {error} (on_bad_row=skip leaves such rows out)"
            ) from error
        self.tally.skipped.append(f"{place}: {error}")

    def _check_template(self, place: str, row: PromptRow) -> None:
        """Without a template no conversation at all can be read: not a fault of one row."""
        tokenizer = self.tokenise.tokenizer
        if self.tokenise.is_conversation(row) and not tokenizer.chat_template:
            raise UserError(
                f"{self.source.name}, {place}: it goes through a chat template, but the tokenizer "
                f"'{tokenizer.name_or_path}' has none: give one with model.chat_template (a file "
                "or its text), or write prompts as plain texts and set data.as_chat=false"
            )


def _with_all_columns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """A column that some rows lack is null there."""
    empty = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return [prompt._replace(columns={**empty, **prompt.columns}) for prompt in prompts]
