"""Sums of losses of pairs, each with a weight and options of its own."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from lit_align.errors import UserError
from lit_align.losses.dispatch import DPOConfig
from lit_align.losses.pair_config import PairConfig, Term
from lit_align.losses.pairs import PREFERENCE_LOSSES, PairLoss
from lit_align.losses.variants import Range

Options = Mapping[str, Any]
WEIGHT = Range(above=0)

# The sums that papers give a name to, with the options that are not the loss's own defaults; where
# each number comes from stands in conf/loss/. The first term's rewards are the ones reported.
COMBINATIONS: Mapping[str, Mapping[str, Options]] = MappingProxyType(
    {
        "cpo": {"cpo_preference": {"weight": 1.0}, "sft": {"weight": 1.0}},
        "cpo_simpo": {
            "simpo": {"weight": 1.0, "beta": 10.0, "gamma_beta_ratio": 0.54},
            "sft": {"weight": 0.05},
        },
        "mpo": {
            "dpo": {"weight": 0.8},
            "bco_pair": {"weight": 0.2, "beta": 0.1},
            "sft": {"weight": 1.0},
        },
        "orpo": {"orpo_odds_ratio": {"weight": 0.1}, "sft_whole": {"weight": 1.0}},
        "rpo": {"dpo": {"weight": 1.0}, "sft": {"weight": 1.0}},
        "slic_hf": {"slic_calibration": {"weight": 1.0}, "sft": {"weight": 0.1}},
    }
)
PREFERENCE_LOSSES.hints.update(
    {name: f"a sum of losses: CombinedConfig.named('{name}')" for name in COMBINATIONS}
)


class CombinedConfig(PairConfig):
    """A weighted sum of losses.

        CombinedConfig({"dpo": {"weight": 0.8, "beta": 0.1}, "sft": {"weight": 1.0}})

    Two configs with the same terms in the same order are equal, whichever aliases named them.

    Args:
        terms: by the name of a loss its `weight`, > 0, and its options; those that are not there
            have the loss's own defaults. Rewards are those of the first.

    Raises:
        UserError: without terms, for an unknown loss or one that is there twice, for a weight or
            an option that cannot be honoured, or for options beside the terms.
    """

    def __init__(self, terms: Mapping[str, Options], **others: Any) -> None:
        if others:
            raise UserError(
                f"a sum of losses takes terms alone, not {', '.join(others)}: say it of a term, as "
                f"in terms.{next(iter(terms or ['dpo']))}.{next(iter(others))}"
            )
        if not isinstance(terms, Mapping) or not terms:
            raise UserError(
                "a sum of losses needs terms, as in {'dpo': {'weight': 0.8}, 'sft': {'weight': 1}},"
                f" not {terms!r}"
            )
        found: dict[str, Term] = {}
        for name, options in terms.items():
            term = _term(name, options)
            if term.config.loss_type in found:
                raise UserError(f"{term.config.title} is there twice, the second time as '{name}'")
            found[term.config.loss_type] = term
        vars(self)["_terms"] = found
        self._check_alignment()

    @classmethod
    def named(cls, name: str) -> "CombinedConfig":
        """One of `COMBINATIONS`.

        Raises:
            UserError: for another name.
        """
        if name not in COMBINATIONS:
            raise UserError(f"unknown sum of losses '{name}'; known: {', '.join(COMBINATIONS)}")
        return cls(COMBINATIONS[name])

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"loss '{' + '.join(self.terms)}'"

    @property
    def terms(self) -> Mapping[str, Term]:
        """The losses, by name, in the order in which they were given."""
        return MappingProxyType(self._terms)

    def as_dict(self) -> dict[str, Any]:
        """Plain values: what the class makes an equal config of."""
        return {"terms": {name: _plain(term) for name, term in self.terms.items()}}

    def _check_alignment(self) -> None:
        """One forward pass makes alignment terms of one kind."""
        kinds = {
            name: kind
            for name, term in self.terms.items()
            if (kind := term.config.alignment_kind) is not None
        }
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{kind} of {name}" for name, kind in kinds.items())
            raise UserError(f"alignment terms must be of one kind in all terms, not {listed}")

    def _lacks(self, name: str) -> str:
        return f"a sum of losses has no '{name}': its terms have"

    def __eq__(self, other: object) -> bool:
        # The first term is told from the others: its rewards are reported.
        return isinstance(other, CombinedConfig) and list(self.terms.items()) == list(
            other.terms.items()
        )

    def __hash__(self) -> int:
        return hash(tuple(self.terms.items()))

    def __repr__(self) -> str:
        return f"CombinedConfig({self.as_dict()['terms']!r})"


def pair_config(loss: str | PairConfig | Mapping[str, Any]) -> PairConfig:
    """The config that a name, or the plain values of a config, stand for.

    Raises:
        UserError: for what they cannot stand for.
    """
    if isinstance(loss, PairConfig):
        return loss
    if isinstance(loss, str):
        return CombinedConfig.named(loss) if loss in COMBINATIONS else DPOConfig(loss)
    if not isinstance(loss, Mapping):
        raise UserError(
            f"a loss is a name, a config or the values of one, not {loss!r}; a sum of several is "
            "a CombinedConfig"
        )
    return CombinedConfig(**loss) if "terms" in loss else DPOConfig(**loss)


def weighted_sum(config: PairConfig, found: Mapping[str, PairLoss]) -> PairLoss:
    """The terms of a loss put together.

        losses = sum_k weight_k * losses_k

    Args:
        config: the weights.
        found: what each term says of each pair, unweighted, by the term's name.

    Returns:
        (B,) each; the rewards are those of the first term.
    """
    first = found[next(iter(config.terms))]
    parts = [term.weight * found[name].losses for name, term in config.terms.items()]
    return first._replace(losses=torch.stack(parts).sum(0))


def _term(name: str, options: Options) -> Term:
    variant = PREFERENCE_LOSSES[name]
    if not isinstance(options, Mapping) or "weight" not in options:
        raise UserError(f"{variant} in a sum of losses needs a weight, as in {{'weight': 1.0}}")
    given = dict(options)
    weight = given.pop("weight")
    if not WEIGHT.admits(weight):
        raise UserError(
            f"{variant} in a sum of losses: weight must be {WEIGHT}, not {weight!r}; to do without "
            f"the term, leave it out (~loss.terms.{name})"
        )
    if "loss_type" in given:
        raise UserError(f"{variant} in a sum of losses is named by its key, not by loss_type")
    return Term(float(weight), DPOConfig(name, **given))


def _plain(term: Term) -> dict[str, Any]:
    options = term.config.as_dict()
    del options["loss_type"]
    return {"weight": term.weight, **options}
