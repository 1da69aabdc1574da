"""From a row to what the policy reads before it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

from transformers import PreTrainedTokenizerBase

from lit_align.data.rows import (
    Message,
    RowError,
    is_absent,
    kind,
    read_template_kwargs,
    read_tools,
    read_turns,
    required,
)
from lit_align.data.tokenise import check_encodable, template_at_work
from lit_align.errors import UserError

# Columns that make the prompt, beside the one that holds it.
RENDERED = frozenset({"tools", "chat_template_kwargs"})
# Roles of a message that a system prompt would double.
SYSTEM = frozenset({"system", "developer"})
# Arguments of every reward, which a column of the same name would hide.
TAKEN = frozenset({"prompts", "completions", "completion_ids"})
# Values of tables that JSON has no type for, and that a text says as well.
TEXT_SAYS_IT = (date, time, timedelta, Decimal, UUID)


class PromptRow(NamedTuple):
    """One row: the prompt, what its template reads, and all other columns."""

    prompt: str | list[Message]
    tools: list[Any] | None
    chat_template_kwargs: Mapping[str, Any]
    columns: dict[str, Any]


@dataclass(frozen=True)
class PromptFormat:
    """How rows become prompts.

    Args:
        prompt_column: that holds the prompt, a text or a list of messages.
        system_prompt: put before conversations that have none of their own.
        as_chat: whether a text is what a user says in a conversation, or goes to the policy as it
            is; None: a conversation if the tokenizer has a chat template.
        chat_template_kwargs: variables of the chat template; those of a row come first.
        max_prompt_length: tokens; longer prompts are left out, for a question that was cut is
            another question. None: no limit.
        on_bad_row: "raise" stops at the first row that cannot be read, "skip" counts such rows.
    """

    prompt_column: str = "prompt"
    system_prompt: str | None = None
    as_chat: bool | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_prompt_length: int | None = 512
    on_bad_row: str = "raise"

    def __post_init__(self) -> None:
        if self.on_bad_row not in ("raise", "skip"):
            raise UserError(f"data.on_bad_row must be one of raise, skip, not {self.on_bad_row!r}")
        if self.as_chat not in (True, False, None):
            raise UserError(f"data.as_chat must be true, false or null, not {self.as_chat!r}")
        if self.system_prompt is not None and self.as_chat is False:
            raise UserError("data.system_prompt needs conversations: set data.as_chat to null")
        length = self.max_prompt_length
        if length is not None and not (type(length) is int and length > 0):
            raise UserError(
                f"data.max_prompt_length must be a whole number of at least 1, not {length!r}"
            )

    def read(self, row: object) -> PromptRow:
        """The parts of one row.

        Raises:
            RowError: naming the field and what is wrong with it.
        """
        if isinstance(row, RowError):
            raise row
        if not isinstance(row, Mapping):
            raise RowError(f"a row must be an object with '{self.prompt_column}', not {kind(row)}")
        prompt = read_turns(self.prompt_column, self._value(row))
        if isinstance(prompt, list):
            _check_conversation(self.prompt_column, prompt)
        return PromptRow(
            prompt,
            read_tools(row.get("tools")),
            read_template_kwargs(row.get("chat_template_kwargs")),
            self._columns(row),
        )

    def _value(self, row: Mapping[str, Any]) -> Any:
        try:
            return required(row, self.prompt_column)
        except RowError as error:
            raise RowError(f"{error}; data.prompt_column names the one to read") from error

    def _columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if taken := TAKEN & (row.keys() - {self.prompt_column}):
            raise RowError(
                f"field '{min(taken)}' has the name of an argument of rewards: rename the column"
            )
        others = row.keys() - RENDERED - {self.prompt_column}
        return {str(name): as_json(name, row[name]) for name in row if name in others}


@dataclass(frozen=True)
class PromptTokeniser:
    """What the policy reads.

    Args:
        tokenizer: of the policy.
        how: rows become prompts.
    """

    tokenizer: PreTrainedTokenizerBase
    how: PromptFormat

    def is_conversation(self, row: PromptRow) -> bool:
        """Whether the chat template writes what the policy reads."""
        if isinstance(row.prompt, list):
            return True
        has_template = bool(self.tokenizer.chat_template)
        return has_template if self.how.as_chat is None else self.how.as_chat

    def __call__(self, row: PromptRow) -> tuple[str | list[Message], list[int]]:
        """The prompt as rewards see it, and its token ids.

        Raises:
            RowError: if the chat template or the tokenizer cannot take it.
        """
        if self.is_conversation(row):
            return self._conversation(row)
        if row.tools or row.chat_template_kwargs:
            raise RowError("'tools' and 'chat_template_kwargs' need a conversation")
        return row.prompt, self._text(str(row.prompt))

    def _conversation(self, row: PromptRow) -> tuple[list[Message], list[int]]:
        prompt = row.prompt
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        if self.how.system_prompt is not None and messages[0]["role"] not in SYSTEM:
            messages = [{"role": "system", "content": self.how.system_prompt}, *messages]
        with template_at_work():
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=row.tools,
                tokenize=False,
                add_generation_prompt=True,
                **{**self.how.chat_template_kwargs, **row.chat_template_kwargs},
            )
        check_encodable(text)
        # A chat template writes all special tokens itself.
        return messages, self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _text(self, text: str) -> list[int]:
        """With the special tokens that the tokenizer puts before a text, not those behind."""
        check_encodable(text)
        ids: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        bare: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ends = range(len(bare), len(ids) + 1)
        return next((ids[:end] for end in ends if ids[end - len(bare) : end] == bare), ids)


def _check_conversation(name: str, messages: list[Message]) -> None:
    if not messages:
        raise RowError(f"field '{name}' is an empty list: a conversation needs a message")
    if messages[-1]["role"] == "assistant":
        raise RowError(
            f"field '{name}' ends with a message of the assistant: a prompt ends where the "
            "answer begins"
        )


def as_json(name: object, value: Any) -> Any:
    """A value with the types of JSON; what is absent in a table is null.

    Raises:
        RowError: for a value that no text says, such as an image.
    """
    if is_absent(value):
        return None
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_json(name, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(name, item) for item in value]
    if isinstance(value, TEXT_SAYS_IT):
        return str(value)
    raise RowError(
        f"field '{name}' holds {kind(value)}, which is no value of JSON: drop the column"
    )
