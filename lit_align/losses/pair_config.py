"""What modules and callbacks ask of a loss of pairs, be it one loss or a sum of several."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from lit_align.losses.config import FrozenConfig
from lit_align.losses.variants import Variant

if TYPE_CHECKING:
    from lit_align.losses.dispatch import DPOConfig

Alignment = Literal["sampled", "greedy"]


class Term(NamedTuple):
    """One loss of a weighted sum."""

    weight: float  # > 0
    config: "DPOConfig"


class PairConfig(FrozenConfig):
    """A loss of preference pairs: a sum of `terms`, which may be one."""

    @property
    def title(self) -> str:
        """What messages call it."""
        raise NotImplementedError

    @property
    def terms(self) -> Mapping[str, Term]:
        """The losses it is a sum of, by name."""
        raise NotImplementedError

    @property
    def _variants(self) -> list[Variant]:
        return [term.config.variant for term in self.terms.values()]

    @property
    def reads_reference(self) -> bool:
        """Whether a term compares the policy with a reference."""
        return any(variant.reads_reference for variant in self._variants)

    @property
    def reads_lengths(self) -> bool:
        """Whether a term counts the responses' tokens."""
        return any(variant.reads_lengths for variant in self._variants)

    @property
    def reads_prompt(self) -> bool:
        """Whether a term scores the prompt as well."""
        return any(variant.reads_prompt for variant in self._variants)

    @property
    def reads_heads(self) -> bool:
        """Whether a term looks at the length that the two responses have in common."""
        return any(variant.reads_heads for variant in self._variants)

    @property
    def whole_window(self) -> bool:
        """Whether a term must be given all pairs of an optimizer step at once."""
        return any(variant.whole_window for variant in self._variants)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the data that some term cannot do without."""
        return tuple(dict.fromkeys(name for v in self._variants for name in v.columns))

    @property
    def alignment_kind(self) -> Alignment | None:
        """Which alignment terms of WPO a term reads; None: none does."""
        kinds = (term.config.alignment_kind for term in self.terms.values())
        return next(filter(None, kinds), None)

    @property
    def reads_alignment(self) -> bool:
        """Whether a term has a use for the alignment terms of WPO."""
        return self.alignment_kind is not None
