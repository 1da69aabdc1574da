"""Tables of named losses, and of the parts that losses are put together from.

A variant is a plain function, and its signature is its whole contract. The parameters before `*`
are the tensors it reads, by their glossary names (those with a default may be missing); the
parameters after `*` are its hyperparameters, each with its default (without one it must be given)
and, in its annotation, the values it may have. Adding a variant is adding one function and one YAML
file.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Annotated, Any, Protocol, TypeVar, get_origin

from lit_align.errors import UserError
from lit_align.names import elsewhere

Fn = TypeVar("Fn", bound=Callable[..., Any])


class Rule(Protocol):
    """Which values a hyperparameter may have; its text completes "must be"."""

    def admits(self, value: object) -> bool:
        """Whether the value is one of them."""


# Of all numbers that can be set: its square, as in a norm of gradients, is finite in float32.
LARGEST = 1e18


@dataclass(frozen=True)
class Range:
    """Finite numbers above `above`, not below `least`, below `below`, and not above `most`.

    Finite in float32, and squared as well: none is larger than `LARGEST`.
    """

    above: float = -math.inf
    least: float = -math.inf
    below: float = math.inf
    most: float = math.inf

    def admits(self, value: object) -> bool:
        # True is a number to Python; here it is a flag in the wrong place.
        if isinstance(value, bool) or not isinstance(value, Real):
            return False
        # A whole number may be larger than any float, and compares all the same.
        number = value if isinstance(value, int) else float(value)
        inside = self.above < number < self.below and self.least <= number <= self.most
        return inside and abs(number) <= LARGEST

    def __str__(self) -> str:
        bounds = {
            "above": self.above,
            "not below": self.least,
            "below": self.below,
            "not above": self.most,
        }
        said = [f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound)]
        return " ".join(["a finite number", " and ".join(said)]).strip()


@dataclass(frozen=True)
class OneOf:
    """One of a few words, or None."""

    choices: tuple[str | None, ...]

    def admits(self, value: object) -> bool:
        return (value is None or isinstance(value, str)) and value in self.choices

    def __str__(self) -> str:
        return f"one of {', '.join(map(str, self.choices))}"


@dataclass(frozen=True)
class Hyperparameter:
    """One parameter after `*`: its default (`Parameter.empty`: none), and what it may be set to."""

    default: Any
    rule: Rule

    @classmethod
    def read(cls, parameter: inspect.Parameter) -> "Hyperparameter":
        """From the signature: the rule is the annotation's, any finite number without one."""
        annotated = get_origin(parameter.annotation) is Annotated
        rule = parameter.annotation.__metadata__[0] if annotated else Range()
        return cls(parameter.default, rule)


@dataclass(frozen=True, eq=False)
class Variant:
    """A named loss and what its signature asks for.

    Attributes:
        name: the name it is known by.
        fn: the function.
        average_logps: whether its log-probs are means over the response's tokens, not sums.
        tensors: the tensors it cannot do without, in the order of the signature.
        optional_tensors: the tensors it reads if there are any.
        hyperparameters: by name, in the order of the signature.
        noun: what kind of thing it is, for messages.
        whole_window: whether it compares the rows of an optimizer step with each other, and so
            must be given all of them at once.
    """

    name: str
    fn: Callable[..., Any]
    average_logps: bool
    tensors: tuple[str, ...]
    optional_tensors: tuple[str, ...]
    hyperparameters: Mapping[str, Hyperparameter]
    noun: str = "loss"
    whole_window: bool = False

    def __str__(self) -> str:
        return f"{self.noun} '{self.name}'"

    @property
    def reads_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return bool(self.reference_tensors)

    @property
    def reference_tensors(self) -> frozenset[str]:
        """What it reads of the reference."""
        return frozenset(name for name in self.tensors if name.startswith("reference_"))

    @property
    def reads_lengths(self) -> bool:
        """Whether the loss counts the responses' tokens."""
        return any(name.endswith("_lengths") for name in self.tensors)

    @property
    def reads_prompt(self) -> bool:
        """Whether the loss scores the prompt's tokens as well."""
        return any("prompt" in name for name in self.tensors)

    @property
    def reads_heads(self) -> bool:
        """Whether the loss looks at the length that the two responses have in common."""
        return any("_head_" in name for name in self.tensors)

    @property
    def reads_alignment(self) -> bool:
        """Whether the loss has a use for the alignment terms of WPO."""
        return any(name.endswith("_alignment_logps") for name in self.optional_tensors)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the data that the loss cannot do without."""
        made = ("policy_", "reference_", "draws")
        return tuple(
            n for n in self.tensors if not n.startswith(made) and not n.endswith("_lengths")
        )

    def settings(self, given: Mapping[str, Any]) -> dict[str, float | str | None]:
        """Every hyperparameter with its value: the given ones checked, the others' defaults.

        Raises:
            UserError: for a name the loss does not take, a value it cannot honour, or one that is
                missing.
        """
        if unknown := given.keys() - self.hyperparameters.keys():
            raise UserError(
                f"{self} takes {', '.join(self.hyperparameters) or 'no options'}, "
                f"not {', '.join(sorted(unknown))}{''.join(map(elsewhere, sorted(unknown)))}"
            )
        return {name: self._value(name, given) for name in self.hyperparameters}

    def _value(self, name: str, given: Mapping[str, Any]) -> float | str | None:
        hyperparameter = self.hyperparameters[name]
        value = given.get(name, hyperparameter.default)
        if value is inspect.Parameter.empty:
            raise UserError(f"{self} needs {name}, {hyperparameter.rule}: it has no default")
        if not hyperparameter.rule.admits(value):
            raise UserError(f"{self}: {name} must be {hyperparameter.rule}, not {value!r}")
        return value if value is None or isinstance(value, str) else float(value)

    def __call__(self, available: Mapping[str, Any], args: Any) -> Any:
        """Call the function with the tensors it names and its hyperparameters read off `args`."""
        if missing := [name for name in self.tensors if name not in available]:
            raise ValueError(f"{self} needs {', '.join(missing)}")
        tensors = {
            name: available[name]
            for name in (*self.tensors, *self.optional_tensors)
            if name in available
        }
        given = {name: getattr(args, name) for name in self.hyperparameters if hasattr(args, name)}
        return self.fn(**tensors, **self.settings(given))


class Variants(dict[str, Variant]):
    """A table that functions enter by decoration.

    Args:
        aliases: other names of a variant, by alias. They can be looked up but are not listed.
        noun: what the table holds, for messages; best the option that chooses from it.

    Attributes:
        hints: where names are found that somebody may look for here, by name.
    """

    def __init__(self, aliases: Mapping[str, str] | None = None, noun: str = "loss") -> None:
        super().__init__()
        self.hints: dict[str, str] = {}
        self.aliases = dict(aliases or {})
        self.noun = noun

    def register(
        self,
        name: str,
        *,
        average_logps: bool = False,
        whole_window: bool = False,
        **defaults: float,
    ) -> Callable[[Fn], Fn]:
        """Enter a function under `name`.

        Args:
            name: what the loss is called in configs.
            average_logps: whether the loss reads means of log-probs over tokens instead of sums.
            whole_window: whether it must be given all rows of an optimizer step at once.
            defaults: hyperparameters whose default under this name is not the function's.
        """

        def enter(fn: Fn) -> Fn:
            if name in self:
                raise ValueError(f"{self[name]} is already taken by {self[name].fn.__qualname__}")
            parameters = inspect.signature(fn, eval_str=True).parameters
            optional = {n for n, p in parameters.items() if p.default is not p.empty}
            tensors = [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
            hyperparameters = {
                n: Hyperparameter.read(p) for n, p in parameters.items() if n not in tensors
            }
            for key, default in defaults.items():
                hyperparameters[key] = replace(hyperparameters[key], default=default)
            self[name] = Variant(
                name,
                fn,
                average_logps,
                tuple(n for n in tensors if n not in optional),
                tuple(n for n in tensors if n in optional),
                hyperparameters,
                self.noun,
                whole_window,
            )
            return fn

        return enter

    def __missing__(self, name: str) -> Variant:
        if name in self.aliases:
            return self[self.aliases[name]]
        if name in self.hints:
            raise UserError(f"'{name}' is {self.hints[name]}")
        also = "".join(f", {alias} (= {own})" for alias, own in self.aliases.items())
        raise UserError(f"unknown {self.noun} '{name}'; known: {', '.join(sorted(self))}{also}")
