"""Configs of losses: what was chosen, and every value it takes, for good."""

from typing import Any, NoReturn


class FrozenConfig:
    """Values that are attributes and do not change.

    A subclass checks what it is given and puts it into `vars(self)`, in the order in which it is to
    be shown. Two configs of one class with the same values are equal.
    """

    def as_dict(self) -> dict[str, Any]:
        """Plain values: what the class makes an equal config of."""
        return dict(vars(self))

    def _lacks(self, name: str) -> str:
        """What to say of an attribute that is not there; nothing may be while a copy is made."""
        return f"a {type(self).__name__} has no '{name}'"

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is not there.
        raise AttributeError(self._lacks(name))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        kind = type(self).__name__
        raise AttributeError(f"a {kind} does not change: make another one to set {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a {type(self).__name__} does not change: it keeps its {name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash(tuple(self.as_dict().items()))

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={value!r}" for key, value in vars(self).items())
        return f"{type(self).__name__}({values})"
