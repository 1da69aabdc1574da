"""One row of labelled data: a completion that is desirable or not, or a pair that makes two.

Accepted are texts or conversations, as for pairs. A completion that is a conversation may repeat
the prompt.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from lit_align.data.rows import (
    LABEL,
    AnswerRow,
    Message,
    PreferenceRow,
    RowError,
    check_answers,
    is_absent,
    is_empty,
    kind,
    read_numbers,
    read_row,
    read_template_columns,
    read_turns,
    required,
    without_prompt,
)
from lit_align.losses import PAIR_COLUMNS

COMPLETION = "completion"
WEIGHT = "weight"
TEMPLATE = ("tools", "chat_template_kwargs")
# In the order in which they are read.
LABELLED_COLUMNS = ("prompt", COMPLETION, LABEL, "chosen", "rejected", *TEMPLATE, *PAIR_COLUMNS)


@dataclass(frozen=True)
class LabelledRow:
    """A prompt and one answer, both texts or both lists of messages.

    Attributes:
        prompt: what the answer follows; a text may be empty, a conversation never is.
        completion: the answer, without the prompt.
        tools: descriptions of functions for the chat template.
        chat_template_kwargs: further variables of the chat template.
        numbers: `label`, 1 for desirable and 0 for undesirable, and maybe `weight`.
    """

    prompt: str | list[Message]
    completion: str | list[Message]
    tools: list[Any] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def answers(self) -> tuple[str | list[Message], ...]:
        return (self.completion,)

    @property
    def is_conversation(self) -> bool:
        return isinstance(self.prompt, list)

    @property
    def drop_reason(self) -> str | None:
        """Why there is nothing to learn from this row, if so."""
        return "empty completion" if is_empty(self.completion) else None


def read_labelled(row: object, ignored: Collection[str] = ()) -> Sequence[AnswerRow]:
    """What one row of a file holds; columns of other names do not matter.

    Args:
        row: with `prompt`, `completion` and `label`, or with what makes a pair.
        ignored: those of `PAIR_COLUMNS` to leave unread.

    Returns:
        One completion, or the two of a pair. A pair of equal answers, which would be desirable and
        undesirable at once, stays a pair, to be dropped.

    Raises:
        RowError: naming the field and what is wrong with it.
    """
    if not isinstance(row, Mapping):
        raise RowError(
            f"a row must be an object with 'prompt', '{COMPLETION}' and '{LABEL}', or with "
            f"'chosen' and 'rejected', not {kind(row)}"
        )
    _refuse_columns_of_pairs(row, ignored)
    numbers = () if WEIGHT in ignored else (WEIGHT,)
    if is_absent(row.get(COMPLETION)) and not is_absent(row.get("chosen")):
        return _split(read_row(row, numbers))
    turns = (read_turns(name, required(row, name)) for name in ("prompt", COMPLETION))
    prompt, completion = _explicit(*turns)
    check_answers(prompt, completion=completion)
    said = {LABEL: _read_label(required(row, LABEL)), **read_numbers(row, numbers)}
    return [LabelledRow(prompt, completion, *read_template_columns(row, prompt), said)]


def _refuse_columns_of_pairs(row: Mapping[str, Any], ignored: Collection[str]) -> None:
    for name in PAIR_COLUMNS.keys() - {WEIGHT, *ignored}:
        if not is_absent(row.get(name)):
            raise RowError(
                f"field '{name}' says something of a pair, which a loss of single completions "
                f"cannot honour: rename it or set data.ignore_columns=[{name}]"
            )


def _split(pair: PreferenceRow) -> Sequence[AnswerRow]:
    """The two answers of a pair, each by itself."""
    if pair.chosen == pair.rejected:
        return [pair]
    of_template = (pair.tools, pair.chat_template_kwargs)
    return [
        LabelledRow(pair.prompt, answer, *of_template, {LABEL: label, **pair.numbers})
        for answer, label in ((pair.chosen, 1.0), (pair.rejected, 0.0))
    ]


def _explicit(prompt: Any, completion: Any) -> tuple[Any, Any]:
    """Prompt and answer apart, and of one kind."""
    if isinstance(prompt, list):
        return prompt, without_prompt(prompt, completion)
    if isinstance(completion, str) or not completion:
        return prompt, completion
    if completion[0]["role"] == "assistant":
        return [{"role": "user", "content": prompt}], completion
    # A conversation that holds the prompt already, which the column only repeats as text.
    asked = [n for n, message in enumerate(completion, 1) if message["role"] == "user"]
    if not asked:
        raise RowError(f"field '{COMPLETION}': the conversation has no message of role 'user'")
    return completion[: asked[-1]], completion[asked[-1] :]


def _read_label(value: object) -> float:
    """1 for desirable, 0 for undesirable."""
    if isinstance(value, Real) and value in (0, 1):
        return float(value)
    raise RowError(
        f"field '{LABEL}' must be true or 1 for a desirable completion, false or 0 for an "
        f"undesirable one, not {kind(value)}"
    )
