"""Which completions are to blame when a reward function fails over a batch."""

import time
from collections import deque
from collections.abc import Callable

from lit_align.rewards.calls import Failed, Mark

TIMEOUTS = 4
"""What all calls of one function for one batch may take together, in timeouts."""

STARTING_SECONDS = 60.0
"""What starting workers may take besides, over and over because the function ends them."""


def halved(
    call: Callable[[range, float], list[Mark] | Failed],
    count: int,
    timeout: float,
    *,
    ready: Callable[[], None],
    note: Callable[[Failed, int], None],
) -> list[Mark]:
    """Call for the whole batch and, as long as a part fails, for both halves of it.

    The largest parts come first, so that most completions are scored when time runs out.

    Args:
        call: gives the marks of a part of the batch within some seconds, or why there are none.
        count: completions of the batch.
        timeout: seconds for the whole batch. A part has its share of it, an eighth at least: one
            that hangs must not cost the whole timeout again at every halving.
        ready: called before each call, outside its time: starts what runs the function.
        note: hears of each failure and the number of completions in that call; may raise.

    Returns:
        (count,) marks; a complaint for each completion without a score.
    """
    marks: list[Mark] = ["was not reached in time"] * count
    left, starting = TIMEOUTS * timeout, STARTING_SECONDS
    parts = deque([range(count)])
    while parts and min(left, starting) > 0:
        part = parts.popleft()
        begin = time.monotonic()
        ready()
        start = time.monotonic()
        result = call(part, min(left, timeout * max(len(part) / count, 1 / 8)))
        starting -= start - begin
        left -= time.monotonic() - start
        if isinstance(result, Failed):
            note(result, len(part))
            parts.extend(_halves(part) if result.may_be_one else ())
            continue
        marks[part.start : part.stop] = result
        if complaint := next((mark for mark in result if isinstance(mark, str)), None):
            note(Failed(complaint), len(part))
    return marks


def _halves(part: range) -> list[range]:
    """Both halves of a part, or nothing of a single completion."""
    middle = len(part) // 2
    return [part[:middle], part[middle:]] if middle else []
