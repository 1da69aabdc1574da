"""A reward function on its way to a worker."""

import functools
import inspect
import threading
from typing import Any

import cloudpickle

from lit_align.errors import UserError
from lit_align.rewards.calls import InProcess, RewardFunction, function_name

_BY_VALUE = threading.Lock()


class Packed:
    """A reward function as bytes, pickled when it is first sent.

    A function of a module is sent as a name; one of a notebook, of the script that was started, or
    of the inside of another function is sent as code, with all that it refers to.

    Args:
        name: what the suite calls it.
        function: the function.
    """

    def __init__(self, name: str, function: RewardFunction) -> None:
        self.name = name
        self.function = function
        self._bytes: bytes | None = None

    @property
    def stays(self) -> bool:
        """Whether it never leaves the trainer's process."""
        return isinstance(self.function, InProcess)

    @property
    def title(self) -> str:
        """Both names, for messages."""
        return f"reward '{self.name}' ({function_name(self.function)})"

    def pickled(self) -> bytes:
        """The bytes that a worker loads."""
        if self._bytes is None:
            self._bytes = self._dumped()
        return self._bytes

    def pickle_module(self) -> bool:
        """From now on send the code of the function's module too, as a worker cannot import it.

        Returns:
            Whether that makes a difference.
        """
        module = inspect.getmodule(_innermost(self.function))
        if module is None or module.__name__.startswith("lit_align."):
            return False
        with _BY_VALUE:
            cloudpickle.register_pickle_by_value(module)
            try:
                self._bytes = self._dumped()
            finally:
                cloudpickle.unregister_pickle_by_value(module)
        return True

    def _dumped(self) -> bytes:
        try:
            dumped: bytes = cloudpickle.dumps(self.function)
        except Exception as error:
            raise self.refused(f"cannot be pickled ({error})") from error
        return dumped

    def refused(self, why: str) -> UserError:
        """The error for a function that no worker can run."""
        return UserError(
            f"{self.title} {why}. It runs in a process of its own so that it can be stopped: "
            "import or build inside the function what it needs, or wrap it in "
            "lit_align.rewards.in_process, where no timeout holds"
        )


def _innermost(function: Any) -> Any:
    """The function inside partials, or the class of a callable object: what has a module."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function)
