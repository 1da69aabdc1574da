"""From texts and conversations to token ids: where the prompt ends, and what is cut.

Prompt and answer are always tokenised together, as the model will read them, and the border
between them is looked for among the token ids. Tokenising the halves apart would give the policy
ids at the border that it never sees otherwise; counting the tokens of the prompt alone would put
the border behind or inside a token that spans it.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar

import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from lit_align.data.cache import digest
from lit_align.data.rows import AnswerRow, RowError, shared_length


class Pair(NamedTuple):
    """Token ids of a pair; both answers follow the same prompt ids."""

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]

    @property
    def drop_reason(self) -> str | None:
        """Why there is nothing to learn from this pair, if so."""
        if _has_nothing_to_score(*self):
            return "empty"
        return "identical" if self.chosen_ids == self.rejected_ids else None


class Completion(NamedTuple):
    """Token ids of a prompt and of one answer."""

    prompt_ids: list[int]
    completion_ids: list[int]

    @property
    def drop_reason(self) -> str | None:
        """Why there is nothing to learn from this answer, if so."""
        return "empty" if _has_nothing_to_score(*self) else None


Ids = TypeVar("Ids", Pair, Completion)


class Kept(NamedTuple, Generic[Ids]):
    """What to learn from, and whether it lost tokens."""

    ids: Ids
    truncated: bool


class Dropped(NamedTuple):
    """Stands for a row that holds nothing to learn from."""

    reason: str


# What the model reads before it answers, and the same with each answer.
Rendered = tuple[str, ...]


@dataclass(frozen=True)
class RowTokeniser(Generic[Ids]):
    """Turns rows into token ids of the prompt and of each answer.

    Args:
        tokenizer: of the policy.
        max_length: tokens of prompt and answer together, at least 2; None: no limit.
        truncation: which end is cut, a key of `TRUNCATIONS`.
        chat_template_kwargs: variables of the chat template; those of a row come first.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int | None = 1024
    truncation: str = "right"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, rows: Sequence[AnswerRow]) -> list[Kept[Ids] | Dropped | RowError]:
        """What becomes of each row, in their order."""
        outcomes: dict[int, Kept[Ids] | Dropped | RowError] = {}
        texts: dict[bool, dict[int, Rendered]] = {True: {}, False: {}}
        for position, row in enumerate(rows):
            try:
                texts[row.is_conversation][position] = self._render(row)
            except RowError as error:
                outcomes[position] = error
        for is_conversation, rendered in texts.items():
            ids = self._encode(list(rendered.values()), is_conversation=is_conversation)
            outcomes |= zip(rendered, map(self._fit, ids), strict=True)
        return [outcomes[position] for position in range(len(rows))]

    @cached_property
    def fingerprint(self) -> str:
        """Identity of everything that the ids of a text depend on."""
        return digest(
            tokenizer=_tokenizer_content(self.tokenizer),
            max_length=self.max_length,
            truncation=self.truncation,
            chat_template_kwargs=dict(self.chat_template_kwargs),
        )

    @abstractmethod
    def made(self, prompt: list[int], *answers: list[int]) -> Ids:
        """The ids of a row."""

    def _render(self, row: AnswerRow) -> Rendered:
        if not row.is_conversation:
            texts: Rendered = (str(row.prompt), *(f"{row.prompt}{a}" for a in row.answers))
        else:
            kwargs = {**self.chat_template_kwargs, **row.chat_template_kwargs}
            with template_at_work():
                texts = _conversation(
                    row,
                    partial(
                        self.tokenizer.apply_chat_template,
                        tools=row.tools,
                        tokenize=False,
                        **kwargs,
                    ),
                )
        check_encodable(*texts)
        return texts

    def _encode(self, texts: list[Rendered], *, is_conversation: bool) -> list[Ids]:
        """Ids of the prompts and answers.

        A chat template writes all special tokens itself. Texts get those that the tokenizer
        puts around every text, and one end token.
        """
        if not texts:
            return []
        ids = self.tokenizer(
            [text for rendered in texts for text in rendered],
            add_special_tokens=not is_conversation,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        end = None if is_conversation else self.tokenizer.eos_token_id
        each = len(texts[0])
        rows = zip(*(ids[n::each] for n in range(each)), strict=True)
        return [
            self.made(*split_at_border(prompt, *(_ended(answer, end) for answer in answers)))
            for prompt, *answers in rows
        ]

    def _fit(self, ids: Ids) -> Kept[Ids] | Dropped:
        """Within `max_length`, and worth keeping."""
        short = ids
        if self.max_length is not None:
            short = TRUNCATIONS[self.truncation](ids, self.max_length)
        truncated = short != ids
        if short.drop_reason:
            return Dropped(f"{short.drop_reason}{' after truncation' if truncated else ''}")
        return Kept(short, truncated)


class PairTokeniser(RowTokeniser[Pair]):
    """Turns rows of two answers into pairs of token ids."""

    def made(self, prompt: list[int], *answers: list[int]) -> Pair:
        return Pair(prompt, *answers)


class CompletionTokeniser(RowTokeniser[Completion]):
    """Turns rows of one answer into token ids."""

    def made(self, prompt: list[int], *answers: list[int]) -> Completion:
        return Completion(prompt, *answers)


def split_at_border(prompt: list[int], *answered: list[int]) -> tuple[list[int], ...]:
    """Ids of the prompt and of each answer, from the ids of their texts.

    The border lies where the texts first differ. If a token spans the end of the prompt, that is
    left of where the prompt ends, and equally so for all answers.

    Args:
        prompt: ids of the prompt alone.
        answered: of each answer, ids of the prompt and the answer.
    """
    border = shared_length(prompt, *answered)
    return (prompt[:border], *(ids[border:] for ids in answered))


def keep_start(ids: Ids, max_length: int) -> Ids:
    """Cut the ends of the answers; a prompt that fills `max_length` leaves none of them."""
    prompt, *answers = ids
    room = max(max_length - len(prompt), 0)
    return type(ids)(prompt, *(answer[:room] for answer in answers))


def keep_end(ids: Ids, max_length: int) -> Ids:
    """Cut the beginning of the prompt, by what the longest answer needs for all.

    An answer that is longer than `max_length` itself takes the whole prompt and keeps its end.
    """
    prompt, *answers = ids
    start = max(len(prompt) + max(map(len, answers)) - max_length, 0)
    return type(ids)(prompt[start:], *(answer[-max_length:] for answer in answers))


TRUNCATIONS: dict[str, Callable[[Any, int], Any]] = {"right": keep_start, "left": keep_end}


def _has_nothing_to_score(prompt: list[int], *answers: list[int]) -> bool:
    """Whether an answer has no token that anything predicts; nothing predicts the first of all."""
    return min(map(len, answers)) <= (0 if prompt else 1)


def _conversation(row: AnswerRow, render: Callable[..., str]) -> Rendered:
    """The conversation as the chat template writes it.

    Raises:
        RowError: if the answers do not continue what the prompt alone looks like: templates
            may drop the reasoning of all turns but the last, for one.
    """
    answered = [render([*row.prompt, *answer]) for answer in row.answers]
    prompt = render(row.prompt, add_generation_prompt=True)
    if not all(text.startswith(prompt) for text in answered):
        # Only the words that open the answer may differ, such as an empty block of reasoning.
        turns = render(row.prompt)
        if not all(text.startswith(turns) for text in answered):
            raise RowError("the chat template does not render the prompt as a prefix")
    return (prompt, *answered)


@contextmanager
def template_at_work() -> Iterator[None]:
    """Whatever a chat template raises is the fault of the row that it was given.

    A template is a program that came with the tokenizer: it may raise anything.
    """
    try:
        yield
    except RowError:
        raise
    except Exception as error:
        raise RowError(f"the chat template refuses it: {error}") from error


def check_encodable(*texts: str) -> None:
    """Raise a `RowError` for texts that no tokenizer can take."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise RowError("it holds half of a UTF-16 surrogate pair, which is no character") from error


def _ended(ids: list[int], end: int | None) -> list[int]:
    """With exactly one `end` behind, however many there were."""
    if end is None:
        return ids
    length = len(ids)
    while length and ids[length - 1] == end:
        length -= 1
    return [*ids[:length], end]


def _tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Vocabulary, rules, special tokens and chat template, and what runs them, as plain values."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = [type(tokenizer).__name__, tokenizer.get_vocab()]
    else:
        rules = backend.to_str()
        # Before these stand padding and truncation as whoever used it last has left them.
        rules = rules[max(rules.find('"added_tokens"'), 0) :]
    return {
        "versions": [tokenizers.__version__, transformers.__version__],
        "rules": rules,
        "splits_special_tokens": getattr(tokenizer, "split_special_tokens", False),
        "special_tokens": tokenizer.special_tokens_map,
        "chat_template": tokenizer.chat_template,
    }
