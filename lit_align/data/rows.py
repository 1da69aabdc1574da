"""One row of preference data: what it may look like, and what is wrong with it if it does not.

Accepted are texts or conversations (lists of `{"role": ..., "content": ...}`), with the prompt in
a column of its own or as the beginning that both answers share. The functions that read a single
field serve rows of prompts as well.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lit_align.losses import PAIR_COLUMNS

Message = dict[str, Any]

COLUMNS = ("prompt", "chosen", "rejected", "tools", "chat_template_kwargs")
REQUIRED = ("chosen", "rejected")
# Whether a completion by itself is desirable.
LABEL = "label"
# Arguments of the rendering itself, no variables of a template.
TAKEN = frozenset({"add_generation_prompt", "continue_final_message", "tokenize", "tools"})
# Names that other collections give to the prompt.
NOT_PROMPT = frozenset({"input", "instruction", "query", "question"})
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "environment")


class RowError(ValueError):
    """What is wrong with one row; whoever reads the file adds where it stands."""


class AnswerRow(Protocol):
    """A prompt and what may follow it, all texts or all lists of messages."""

    @property
    def prompt(self) -> str | list[Message]:
        """What each answer follows; a text may be empty, a conversation never is."""

    @property
    def answers(self) -> tuple[str | list[Message], ...]:
        """Without the prompt."""

    @property
    def tools(self) -> list[Any] | None:
        """Descriptions of functions for the chat template."""

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """Further variables of the chat template."""

    @property
    def numbers(self) -> Mapping[str, float]:
        """What else is said of the row, without its nulls."""

    @property
    def is_conversation(self) -> bool:
        """Whether there are messages, not texts."""

    @property
    def drop_reason(self) -> str | None:
        """Why there is nothing to learn from this row, if so."""


@dataclass(frozen=True)
class PreferenceRow:
    """A prompt and two answers, all texts or all lists of messages.

    Attributes:
        prompt: what both answers follow; a text may be empty, a conversation never is.
        chosen: the better answer, without the prompt.
        rejected: the other answer, without the prompt.
        tools: descriptions of functions for the chat template.
        chat_template_kwargs: further variables of the chat template.
        numbers: of the columns of `PAIR_COLUMNS` that the row has, without its nulls.
    """

    prompt: str | list[Message]
    chosen: str | list[Message]
    rejected: str | list[Message]
    tools: list[Any] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def answers(self) -> tuple[str | list[Message], ...]:
        return self.chosen, self.rejected

    @property
    def is_conversation(self) -> bool:
        return isinstance(self.prompt, list)

    @property
    def drop_reason(self) -> str | None:
        """Why there is nothing to learn from this row, if so."""
        if self.chosen == self.rejected:
            return "identical"
        for name in REQUIRED:
            if is_empty(getattr(self, name)):
                return f"empty {name}"
        return None


def read_row(row: object, numbers: Collection[str] = PAIR_COLUMNS) -> PreferenceRow:
    """The preference in one row of a file; columns of other names do not matter.

    Args:
        row: of the file.
        numbers: those of `PAIR_COLUMNS` to read.

    Raises:
        RowError: naming the field and what is wrong with it.
    """
    if not isinstance(row, Mapping):
        raise RowError(f"a row must be an object with 'chosen' and 'rejected', not {kind(row)}")
    chosen, rejected = (read_turns(name, required(row, name)) for name in REQUIRED)
    prompt = None if is_absent(row.get("prompt")) else read_turns("prompt", row["prompt"])
    if prompt is None and isinstance(chosen, str) and (other := NOT_PROMPT & row.keys()):
        raise RowError(
            f"there is no 'prompt', but '{min(other)}', which would go unread: rename the column"
        )
    prompt, chosen, rejected = _explicit(prompt, chosen, rejected)
    check_answers(prompt, chosen=chosen, rejected=rejected)
    of_template = read_template_columns(row, prompt)
    return PreferenceRow(prompt, chosen, rejected, *of_template, read_numbers(row, numbers))


def _explicit(prompt: Any, chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Prompt and answers apart, and of one kind."""
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise RowError("one of 'chosen' and 'rejected' is a text and the other a list of messages")
    if prompt is None:
        return _split_at_common_prefix(chosen, rejected)
    if isinstance(prompt, str) and isinstance(chosen, list):
        if all(first["role"] == "assistant" for first in [*chosen[:1], *rejected[:1]]):
            return [{"role": "user", "content": prompt}], chosen, rejected
        # Conversations that hold the prompt already, which the column only repeats as text.
        return _split_at_common_prefix(chosen, rejected)
    if isinstance(prompt, list):
        return prompt, without_prompt(prompt, chosen), without_prompt(prompt, rejected)
    return prompt, chosen, rejected


def _split_at_common_prefix(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Characters of texts, whole messages of conversations."""
    length = shared_length(chosen, rejected)
    if isinstance(chosen, list) and not length:
        raise RowError("'chosen' and 'rejected' share no first message, so there is no prompt")
    return chosen[:length], chosen[length:], rejected[length:]


def shared_length(*sequences: Sequence[Any]) -> int:
    """How many first items all the sequences have in common."""
    for position, items in enumerate(zip(*sequences, strict=False)):
        if any(item != items[0] for item in items):
            return position
    return min(map(len, sequences))


def without_prompt(prompt: list[Message], answer: str | list[Message]) -> list[Message]:
    """The messages of an answer, which may be one text or may repeat the prompt."""
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    repeats = len(answer) > len(prompt) and answer[: len(prompt)] == prompt
    return answer[len(prompt) :] if repeats else answer


def check_answers(prompt: Any, **answers: Any) -> None:
    """An answer that began with a user's words would train the policy to say them."""
    if not isinstance(prompt, list):
        return
    if not prompt:
        raise RowError("field 'prompt' is an empty list: a conversation needs a message")
    for name, answer in answers.items():
        if answer and answer[0]["role"] != "assistant":
            raise RowError(
                f"field '{name}': the answer begins with a message of role "
                f"'{answer[0]['role']}', not 'assistant'"
            )


def required(row: Mapping[str, Any], name: str) -> Any:
    """The value of a field, if there is one."""
    if is_absent(row.get(name)):
        raise RowError(f"field '{name}' is missing (the row has: {', '.join(map(str, row))})")
    return row[name]


def read_turns(name: str, value: object) -> str | list[Message]:
    """A text as it is, a list of messages checked."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [_message(f"field '{name}', message {n}", item) for n, item in enumerate(value, 1)]
    raise RowError(f"field '{name}' must be a text or a list of messages, not {kind(value)}")


def _message(place: str, value: object) -> Message:
    if not isinstance(value, Mapping):
        raise RowError(f"{place} must be an object with 'role' and 'content', not {kind(value)}")
    message: Message = without_nulls(value)
    if "role" not in message:
        raise RowError(f"{place}: 'role' is missing (it has: {', '.join(message)})")
    if message["role"] not in ROLES:
        raise RowError(f"{place}: unknown role {message['role']!r} (known: {', '.join(ROLES)})")
    if message.get("tool_calls"):
        # A turn that only calls a function has no words; templates would print "None" for them.
        message = {"content": "", **message, "tool_calls": _calls(message["tool_calls"])}
    if not isinstance(message.get("content"), str):
        raise RowError(f"{place}: 'content' must be a text, not {kind(message.get('content'))}")
    return message


def without_nulls(value: Any) -> Any:
    """Keys without a value left out at any depth: Arrow adds to each row the keys of the others."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _calls(calls: Any) -> Any:
    """Calls with their arguments as objects, which is what chat templates expect."""
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            # What a model wrote need not be JSON; such a call stays the text it is.
            function["arguments"] = _parsed(function["arguments"], function["arguments"])
    return calls


def _parsed(text: str, otherwise: Any) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return otherwise


def read_template_columns(
    row: Mapping[str, Any], prompt: str | list[Message]
) -> tuple[list[Any] | None, dict[str, Any]]:
    """What a row gives to the chat template: `tools` and `chat_template_kwargs`."""
    tools = read_tools(row.get("tools"))
    template_kwargs = read_template_kwargs(row.get("chat_template_kwargs"))
    if isinstance(prompt, str) and (tools or template_kwargs):
        raise RowError("'tools' and 'chat_template_kwargs' need a conversation, not plain texts")
    return tools, template_kwargs


def read_tools(value: Any) -> list[Any] | None:
    """Descriptions of functions, also from JSON text."""
    if isinstance(value, str):
        value = _parsed(value, value)
    elif not is_absent(value):
        value = without_nulls(value)
    if is_absent(value) or value == []:
        return None
    if not isinstance(value, list):
        raise RowError(f"field 'tools' must be a list, also as JSON text, not {kind(value)}")
    return value


def read_template_kwargs(value: Any) -> dict[str, Any]:
    """Variables of a chat template, also from JSON text."""
    if isinstance(value, str):
        value = _parsed(value, value)
    if is_absent(value):
        return {}
    if not isinstance(value, Mapping):
        raise RowError(f"field 'chat_template_kwargs' must be an object, not {kind(value)}")
    if taken := TAKEN & value.keys():
        raise RowError(f"'chat_template_kwargs' cannot set '{min(taken)}', which is ours to set")
    return dict(without_nulls(value))


def read_numbers(row: Mapping[str, Any], names: Collection[str]) -> dict[str, float]:
    """What a row says in numbers, without the columns that it leaves empty."""
    present = {name: row[name] for name in names if row.get(name) is not None}
    for name, value in present.items():
        if not PAIR_COLUMNS[name].admits(value):
            raise RowError(
                f"field '{name}' must be {PAIR_COLUMNS[name]}, not {kind(value)}: if it says "
                f"something else, rename it or set data.ignore_columns=[{name}]"
            )
    return {name: float(value) for name, value in present.items()}


def is_empty(answer: str | list[Message]) -> bool:
    """Whether an answer says nothing and calls nothing."""
    if isinstance(answer, str):
        return not answer
    return not any(message["content"] or message.get("tool_calls") for message in answer)


def is_absent(value: object) -> bool:
    """None, and the NaN that stands for it in tables of numbers."""
    return value is None or (isinstance(value, float) and value != value)  # noqa: PLR0124


def kind(value: object) -> str:
    """A JSON name for the type of a value."""
    names = {type(None): "null", dict: "an object", list: "a list", str: "a text", bool: "a truth"}
    return names.get(type(value), f"{type(value).__name__} {value!r}"[:40])
