"""One call of a reward function: what it is given, and what its answer is worth.

Runs wherever the function runs, in a worker or in the trainer's own process, and therefore imports
next to nothing.
"""

import functools
import inspect
import math
import reprlib
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lit_align.errors import UserError

RewardFunction = Callable[..., Any]
Mark = float | str | None
"""What one completion got: a finite number, None (not applicable), or a word of complaint."""


class Failed(NamedTuple):
    """Why a call gave no scores.

    Args:
        what: what the function did, to follow its name: "raised ValueError: ...".
        may_be_one: whether one completion may be to blame, so that the others are worth a retry.
        is_setup: whether the set-up is to blame, whatever the completions: `what` says it all.
    """

    what: str
    may_be_one: bool = True
    is_setup: bool = False


class InProcess:
    """A reward function that stays in the trainer's process; made by `in_process`."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def in_process(function: RewardFunction) -> InProcess:
    """Keep a reward function out of the workers: for one that needs the GPU or cannot be pickled.

    It runs in the thread that scores and sees the trainer's memory, so a reward model is not
    copied. Nothing can stop it: **the suite's timeout does not hold for it**.

    Args:
        function: any reward function.
    """
    return InProcess(function)


def function_name(function: RewardFunction) -> str:
    """What to call it in a message: the name of the innermost function, else of its class."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, InProcess):
            function = function.function
        else:
            return str(getattr(function, "__name__", type(function).__name__))


def wanted(function: RewardFunction, available: Collection[str]) -> list[str]:
    """Names among `available` that the function takes, all of them if it has `**kwargs`.

    Raises:
        UserError: if a parameter without a default is not available.
    """
    inner = function.function if isinstance(function, InProcess) else function
    bound = inner.keywords if isinstance(inner, functools.partial) else {}
    try:
        parameters = inspect.signature(inner).parameters.values()
    except (TypeError, ValueError):  # some built-in functions do not tell
        return list(available)
    if missing := [name for name in _required(parameters) if name not in available]:
        raise UserError(
            f"reward function {function_name(function)} takes '{missing[0]}', and there is no "
            f"such column: there are {', '.join(sorted(available))}"
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return [name for name in available if name not in bound]
    named = {parameter.name for parameter in parameters} - set(bound)
    return [name for name in available if name in named]


def _required(parameters: Collection[inspect.Parameter]) -> list[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in variadic
    ]


def outcome(
    function: RewardFunction, arguments: Mapping[str, Any], count: int
) -> list[Mark] | Failed:
    """Call the function and check what it returns.

    Args:
        function: takes every argument by name; a coroutine is run to its end.
        arguments: what it takes, a list of `count` entries each.
        count: completions.
    """
    try:
        returned = function(**arguments)
        if inspect.isawaitable(returned):
            returned = _awaited(returned)
        return _checked(returned, count)
    except UserError as error:
        return Failed(str(error), may_be_one=False, is_setup=True)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, and time limits made to pass `except`
        return Failed(f"raised {_told(error)}")


def _checked(returned: Any, count: int) -> list[Mark] | Failed:
    """What a function returned as marks, if it is a list of the right length."""
    if not hasattr(returned, "__iter__") or isinstance(returned, str | bytes | Mapping):
        return Failed(f"returned {reprlib.repr(returned)}, not a list", may_be_one=False)
    marks = [mark(value) for value in returned]
    if len(marks) == count:
        return marks
    # Called for a single completion, the same function would seem to do well.
    return Failed(
        f"returned a list of the wrong length ({count} expected, {len(marks)} returned)",
        may_be_one=False,
    )


def mark(value: Any) -> Mark:
    """A score as a plain number: None for None and NaN, a complaint for what is no number."""
    if value is None:
        return None
    try:
        number = math.inf if isinstance(value, str | bytes) else float(value)
    except Exception:
        number = math.inf
    if math.isfinite(number):
        return number
    return None if math.isnan(number) else f"gave the score {reprlib.repr(value)}, no finite number"


def _awaited(awaitable: Any) -> Any:
    """What a coroutine returns, also where an event loop already runs, as in a notebook."""
    import asyncio  # takes longer than all else here, and few functions need it
    from concurrent.futures import ThreadPoolExecutor

    async def wait() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, wait()).result()


def _told(error: BaseException) -> str:
    """Type, text and place of an exception, in one line."""
    text = traceback.format_exception_only(error)[-1].strip()[:500]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
