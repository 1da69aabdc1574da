"""Which completion of another prompt stands beside each row, for KTO's reference point.

It is chosen once for the whole set, by a function of the seed alone: the reference can be asked
about it before training, and rows may come in any order and in batches of any size.
"""

from collections.abc import Sequence
from itertools import accumulate

from lit_align.errors import UserError

NOWHERE = -1
# How many runs of unsuitable rows are passed over before an equal completion is put up with.
TRIES = 1000


def mismatched_rows(
    prompts: Sequence[int], completions: Sequence[int], order: Sequence[int]
) -> list[int]:
    """For each row the one whose completion is to follow its prompt.

    It is the next one in `order`, as on a circle, that has another prompt and another completion;
    where all other prompts have just the same completion, that one.

    Args:
        prompts: identity of each row's prompt.
        completions: identity of each row's completion.
        order: of the rows, each once.

    Returns:
        Row numbers, in the order of the rows.

    Raises:
        UserError: if there are fewer than two different prompts.
    """
    circle = _Circle([prompts[row] for row in order], [completions[row] for row in order])
    found = [NOWHERE] * len(order)
    for position, row in enumerate(order):
        found[row] = order[circle.partner(position)]
    return found


class _Circle:
    """Rows in a circle, laid out twice so that a step over the end is none."""

    def __init__(self, prompts: Sequence[int], completions: Sequence[int]) -> None:
        self.rows = len(prompts)
        self.prompts = [*prompts, *prompts]
        self.completions = [*completions, *completions]
        self.next_prompt = _next_other(self.prompts)
        self.next_completion = _next_other(self.completions)

    def partner(self, first: int) -> int:
        """The place of the row that a row is put together with."""
        at = fallback = self.next_prompt[first]
        if fallback == NOWHERE:
            raise UserError(
                "the loss compares the policy with its reference on completions of other prompts, "
                f"and all {self.rows} rows have the same prompt: give it at least two different "
                "ones, or choose a loss without such a comparison, such as bco"
            )
        for _ in range(TRIES):
            if not first < at < first + self.rows:
                break
            if self.prompts[at] == self.prompts[first]:
                at = self.next_prompt[at]
            elif self.completions[at] == self.completions[first]:
                at = self.next_completion[at]
            else:
                return at % self.rows
        return fallback % self.rows


def _next_other(values: Sequence[int]) -> list[int]:
    """For each place the next one with another value, else `NOWHERE`."""
    places = range(len(values) - 1)

    def step(after: int, place: int) -> int:
        return place + 1 if values[place] != values[place + 1] else after

    return [*accumulate(reversed(places), step, initial=NOWHERE)][::-1]
