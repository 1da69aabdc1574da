"""Rewards that look at the text alone: the same answer, the asked form."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_align.errors import UserError


def completion_text(value: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a prompt or completion, be it a text or a list of messages.

    Args:
        value: a text, which is returned as it is, or messages: their contents, line by line. Of a
            content in parts, as for images, the parts that are text count.
    """
    if isinstance(value, str):
        return value
    return "\n".join(_content(message.get("content")) for message in value)


def _content(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    if content is None:  # a message that only calls a tool
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


def column_values(columns: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    """One column of the data.

    Raises:
        UserError: if the data has no such column.
    """
    if name not in columns:
        others = sorted(set(columns) - {"prompts", "completions", "completion_ids"})
        raise UserError(
            f"the data has no column '{name}': there are {', '.join(others) or 'none'}; "
            "name the column to compare with by `column`"
        )
    return columns[name]


def exact_match(
    completions: Sequence[Any], *, column: str = "answer", **columns: Sequence[Any]
) -> list[float | None]:
    """1 for a completion that is the answer, letter by letter, 0 for any other.

    White space around both is ignored.

    Args:
        completions: texts or lists of messages, N.
        column: where the right answers stand; a number counts as it is written.
        columns: the data.

    Returns:
        N scores, 0 or 1; None where the data has no answer (null).
    """
    return [
        None if answer is None else float(completion_text(text).strip() == _stripped(answer))
        for text, answer in zip(completions, column_values(columns, column), strict=True)
    ]


def _stripped(answer: Any) -> str:
    return (completion_text(answer) if isinstance(answer, list) else str(answer)).strip()


def format_match(completions: Sequence[Any], *, pattern: str, whole: bool = True) -> list[float]:
    r"""1 for a completion of the asked form, 0 for any other.

    Args:
        completions: texts or lists of messages, N.
        pattern: regular expression of Python's `re`. Begin it with `(?s)` if a dot may be the end
            of a line.
        whole: whether the whole completion must match, but for white space around it; if not, a
            match anywhere will do.

    Returns:
        N scores, 0 or 1.

    Raises:
        UserError: if the pattern is no regular expression.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"pattern is no regular expression: {error} in {pattern!r}") from error
    find = compiled.fullmatch if whole else compiled.search
    return [float(find(completion_text(text).strip()) is not None) for text in completions]
