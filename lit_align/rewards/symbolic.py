"""Rewards for mathematical expressions, compared by what they mean."""

import threading
from collections.abc import Sequence
from typing import Any

from lit_align.errors import missing_extra
from lit_align.rewards.text import column_values, completion_text

_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def math_match(
    completions: Sequence[Any],
    *,
    column: str = "answer",
    seconds: int = 5,
    **columns: Sequence[Any],
) -> list[float | None]:
    r"""1 for a completion whose last expression equals the answer, by Math-Verify; 0 for any other.

    Args:
        completions: texts or lists of messages, N. LaTeX is read between delimiters (`$...$`,
            `\boxed{...}`, `\(...\)`), plain numbers and sums of numbers anywhere.
        column: where the right answers stand: an expression with or without delimiters, or a
            solution that ends in `#### ` and the answer.
        seconds: for reading and for comparing one completion, which scores 0 beyond. It holds in
            the main thread only, as in a worker; elsewhere nothing stops a comparison.
        columns: the data.

    Returns:
        N scores, 0 or 1; None where the data has no expression.

    Raises:
        UserError: if the extra `math` is not installed.

    Source:
        https://github.com/huggingface/Math-Verify
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise missing_extra("math-verify", "math") from error
    # Its alarm signal is refused outside the main thread, where every score would be lost.
    is_main = threading.current_thread() is threading.main_thread()
    limit = seconds if is_main else None

    def read(text: str) -> list[Any]:
        found: list[Any] = parse(text, fallback_mode="no_fallback", parsing_timeout=limit)
        return found

    def score(completion: Any, answer: Any) -> float | None:
        right = None if answer is None else read_answer(str(answer))
        if not right:
            return None
        return float(verify(right, read(completion_text(completion)), timeout_seconds=limit))

    def read_answer(text: str) -> list[Any]:
        text = text.rpartition("####")[2].strip()
        # Without delimiters, only the numbers of an expression would be read.
        delimited = text if any(each in text for each in _DELIMITERS) else f"${text}$"
        return read(delimited) or read(text)

    return [
        score(completion, answer)
        for completion, answer in zip(completions, column_values(columns, column), strict=True)
    ]
