"""The scorers of reasoning-gym, for the rows of its tasks."""

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from lit_align.errors import UserError, missing_extra
from lit_align.rewards.text import completion_text

# Tasks whose scorer evaluates the answer as Python: values such as a list ...
EVALUATES_VALUES = frozenset(
    {"binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"}
)
# ... or whole expressions, through sympy, which evaluates texts inside them again.
EVALUATES_EXPRESSIONS = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
# Tasks that compare with tuples, which JSON has not.
TUPLES = frozenset({"arc_agi", "rearc"})

LONGEST = 2000
"""Characters of an answer that may be evaluated."""

LARGEST_POWER = 99

_VALUE = (ast.Expression, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple)
_SIGNS = (ast.UnaryOp, ast.USub, ast.UAdd)
_ARITHMETIC = (*_SIGNS, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.Call)
_TRIGONOMETRIC = {
    f"{arc}{name}{h}" for arc in ("", "a") for name in ("sin", "cos", "tan") for h in ("", "h")
}
_FUNCTIONS = {*_TRIGONOMETRIC, "Abs", "cot", "csc", "exp", "ln", "log", "sec", "sqrt"}


def gym_score(
    completions: Sequence[Any], entry: Sequence[Any], *, tag: str | None = "answer"
) -> list[float | None]:
    """What the task's own scorer in reasoning-gym gives the answer, from 0 to 1.

    Many scorers give a part of the score to a text that contains the answer, so a policy would
    learn to recite; hence only what stands between tags is scored. Some scorers evaluate the answer
    as code; what is more than values, or than arithmetic with known functions, is never shown to
    them and counts as no answer. A scorer that breaks on an answer gives 0.

    Args:
        completions: texts or lists of messages, N.
        entry: the items of reasoning-gym, as JSON texts or mappings; a scorer may evaluate them,
            so they must come from where you trust.
        tag: the answer stands between `<tag>` and `</tag>`, the last such pair; None: the whole
            completion is the answer.

    Returns:
        N scores; None where the data has no entry.

    Raises:
        UserError: if the extra `gym` is not installed, or an entry is not of a known task.

    Source:
        https://github.com/open-thought/reasoning-gym
    """
    return [
        None if item is None else _score(_answer(completion_text(completion), tag), _entry(item))
        for completion, item in zip(completions, entry, strict=True)
    ]


def _answer(text: str, tag: str | None) -> str | None:
    if tag is None:
        return text.strip()
    before, closing, _ = text.rpartition(f"</{tag}>")
    _, opening, answer = before.rpartition(f"<{tag}>")
    return answer.strip() if closing and opening else None


def _entry(item: Any) -> dict[str, Any]:
    entry = json.loads(item) if isinstance(item, str) else item
    if not isinstance(entry, Mapping) or "source_dataset" not in entry.get("metadata", {}):
        raise UserError(
            "the column 'entry' must hold items of reasoning-gym, whose metadata name their "
            f"source_dataset; it holds {str(item)[:100]!r}"
        )
    if entry["metadata"]["source_dataset"] in TUPLES:
        entry = {**entry, "metadata": _tuples(entry["metadata"])}
    return dict(entry)


def _tuples(value: Any) -> Any:
    """The same with each list as a tuple."""
    if isinstance(value, Mapping):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value


def _score(answer: str | None, entry: dict[str, Any]) -> float:
    task = entry["metadata"]["source_dataset"]
    scorer = _scorer(task)
    if answer is not None and not _is_harmless(answer, task):
        answer = None
    try:
        return float(scorer(answer, entry))
    except Exception:
        # Is it the answer or the entry? If its own answer breaks it too, all would score 0.
        scorer(entry["answer"], entry)
        return 0.0


@lru_cache(maxsize=128)
def _scorer(task: str) -> Callable[[str | None, dict[str, Any]], float]:
    try:
        import reasoning_gym
    except ImportError as error:
        raise missing_extra("reasoning-gym", "gym") from error
    try:
        scorer: Callable[[str | None, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(
            task
        )
    except ValueError as error:
        raise UserError(f"reasoning-gym has no task '{task}'") from error
    return scorer


def _is_harmless(answer: str, task: str) -> bool:
    """Whether the task's scorer may see the answer: it does not evaluate it, or nothing happens."""
    if task not in EVALUATES_VALUES | EVALUATES_EXPRESSIONS:
        return True
    if len(answer) > LONGEST:
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Python refuses it as well, but sympy reads more than Python.
        return task in EVALUATES_VALUES
    if task in EVALUATES_VALUES:
        return all(isinstance(node, (*_VALUE, *_SIGNS)) for node in ast.walk(tree))
    return all(_is_arithmetic(node) for node in ast.walk(tree))


def _is_arithmetic(node: ast.AST) -> bool:
    """Whether a node is arithmetic whose result is not much longer than its text."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _is_small_power(node)
    return isinstance(node, (*_VALUE, *_ARITHMETIC)) and not isinstance(node, ast.List | ast.Tuple)


def _is_small_power(power: ast.BinOp) -> bool:
    """No power of a power, and no large exponent: 9**9**9 has 370 million digits."""
    nested = (ast.walk(power.left), ast.walk(power.right))
    if any(isinstance(node, ast.Pow) for nodes in nested for node in nodes):
        return False
    exponent = power.right
    while isinstance(exponent, ast.UnaryOp):
        exponent = exponent.operand
    if isinstance(exponent, ast.BinOp) and isinstance(exponent.op, ast.Div):
        return all(_is_small(part) for part in (exponent.left, exponent.right))
    return _is_small(exponent)


def _is_small(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return abs(node.value) <= LARGEST_POWER
    return isinstance(node, ast.Name)
