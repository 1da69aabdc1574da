"""Which policy loss: one choice per axis, checked when they are made.

The axes are independent. What one of them offers is a table of functions; what does not go together
with what is said here, with the reason.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lit_align.errors import UserError
from lit_align.losses.advantages import ADVANTAGES
from lit_align.losses.aggregation import AGGREGATIONS
from lit_align.losses.config import FrozenConfig
from lit_align.losses.correction import CORRECTIONS
from lit_align.losses.entropy import ENTROPY_CONTROLS
from lit_align.losses.filters import FILTERS
from lit_align.losses.kl import kl_estimator as kl_variant
from lit_align.losses.policy import SURROGATES
from lit_align.losses.ratio import RATIOS
from lit_align.losses.variants import OneOf, Range, Rule, Variant

_WEIGHT = Range(least=0)
_PLACES = OneOf(("loss", "reward"))
_OLD = OneOf(("trainer", "sampler"))
# open-instruct's config has both bounds whatever its loss; cispo has no use for the lower one.
_UNUSED = {"cispo": {"clip_lower"}}
# What is no choice, but known of the sampler: it may be said whether anything reads it or not.
_FACTS = {"max_completion_length"}
# What compares a token with all others that it is given: a rank, a quantile, a mean.
_OF_THE_WINDOW = {
    "loss_fn": {"clip_cov", "kl_cov"},
    "correction": {"tis_normalised", "tis_sequence_normalised"},
    "token_filter": {"top_entropy"},
}
# Corrections whose weights are a completion's, repeated, and no factors of a product over tokens.
_OF_A_ROW = {"tis_sequence", "tis_geometric", "tis_sequence_normalised", "sequence_mask"}
_OF_A_ROW |= {"geometric_mask"}


class GRPOConfig(FrozenConfig):
    """Which policy loss: one choice per axis, and every hyperparameter that the choices take.

    Two configs with the same choices and values are equal, whichever alias named them.

    Args:
        loss_fn: the surrogate, a name of `SURROGATES`; "dapo" is "clip".
        ratio_level: a name of `RATIOS`.
        aggregation: a name of `AGGREGATIONS`.
        advantage: a name of `ADVANTAGES`.
        correction: of the sampler's mismatch, a name of `CORRECTIONS`.
        token_filter: which tokens have a policy term, a name of `FILTERS`.
        kl_estimator: a number or name of `KL_ESTIMATORS`; 2 is "k3".
        kl_in: "loss", or "reward": then it is subtracted there before there are advantages.
        beta: weight of the KL, >= 0; usually 0 to 0.1.
        entropy_bonus: weight of the policy's entropy in the loss, >= 0, in the advantages' unit per
            nat; 0: none. With a control, the weight that it begins with.
        entropy_control: how the weight changes, a name of `ENTROPY_CONTROLS`.
        old_policy: whose log-probs a ratio divides by: "trainer", those of the policy before the
            update, by the trainer's own path; or "sampler", those with which the tokens were drawn.
            With the latter, correction and token_filter compare the policy in training with the
            sampler, and not that before the update.
        hyperparameters: of the chosen functions, by their names; those left out or None have the
            function's own default. With "cispo", `clip_lower` may be given and does nothing; so
            may `max_completion_length` with anything, which is known of the sampler.

    Raises:
        UserError: for an unknown name, a value that cannot be honoured, a hyperparameter that
            nothing chosen reads, or choices that do not go together; each with the reason.
    """

    loss_fn: str
    ratio_level: str
    aggregation: str
    advantage: str
    correction: str
    token_filter: str
    kl_estimator: int | str
    kl_in: str
    beta: float
    entropy_bonus: float
    entropy_control: str
    old_policy: str

    def __init__(  # noqa: PLR0913 - one for each axis
        self,
        loss_fn: str = "dapo",
        *,
        ratio_level: str = "token",
        aggregation: str = "token_mean",
        advantage: str = "group_mean_std",
        correction: str = "none",
        token_filter: str = "none",
        kl_estimator: int | str = 2,
        kl_in: str = "loss",
        beta: float = 0.0,
        entropy_bonus: float = 0.0,
        entropy_control: str = "fixed",
        old_policy: str = "trainer",
        **hyperparameters: float | str | None,
    ) -> None:
        vars(self).update(loss_fn=loss_fn, ratio_level=ratio_level, aggregation=aggregation)
        vars(self).update(advantage=advantage, correction=correction, token_filter=token_filter)
        vars(self).update(kl_estimator=kl_estimator, kl_in=_checked("kl_in", kl_in, _PLACES))
        for name, weight in {"beta": beta, "entropy_bonus": entropy_bonus}.items():
            vars(self).update({name: float(_checked(name, weight, _WEIGHT))})
        vars(self).update(entropy_control=entropy_control)
        vars(self).update(old_policy=_checked("old_policy", old_policy, _OLD))
        vars(self).update(_settings(self.variants, hyperparameters))
        _refuse_clashes(self)

    @property
    def variants(self) -> dict[str, Variant]:
        """The function of each axis, and what it reads."""
        return {
            "loss_fn": SURROGATES[self.loss_fn],
            "ratio_level": RATIOS[self.ratio_level],
            "aggregation": AGGREGATIONS[self.aggregation],
            "advantage": ADVANTAGES[self.advantage],
            "correction": CORRECTIONS[self.correction],
            "token_filter": FILTERS[self.token_filter],
            "kl_estimator": kl_variant(self.kl_estimator),
            "entropy_control": ENTROPY_CONTROLS[self.entropy_control],
        }

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the policy's entropy is, or may become, a part of the loss."""
        return self.entropy_bonus != 0 or self.variants["entropy_control"].name != "fixed"

    @property
    def reads_reference(self) -> bool:
        """Whether anything depends on a reference."""
        return self.beta != 0

    @property
    def reads_ratio(self) -> bool:
        """Whether the loss allows for a policy that has moved since it was sampled from.

        By the surrogate's ratio; or by a correction's weights, if these are of the policy as it is.
        """
        return _divides(self) or (self.old_policy == "sampler" and self.correction != "none")

    @property
    def sampler_readers(self) -> str:
        """What needs the log-probs under which completions were sampled, as text, or nothing."""
        variants = (self.variants[axis] for axis in ("correction", "token_filter"))
        readers = [str(v) for v in variants if "sampler_logprobs" in v.tensors]
        return " and ".join(readers + ["old_policy 'sampler'"] * (self.old_policy == "sampler"))

    @property
    def reads_sampler(self) -> bool:
        """Whether the log-probs under which completions were sampled are needed."""
        return bool(self.sampler_readers)

    @property
    def reads_alignment(self) -> bool:
        """Whether the advantage looks at the distributions that tokens were drawn from."""
        return "alignment" in self.variants["advantage"].tensors

    @property
    def reads_greedy(self) -> bool:
        """Whether a completion is compared with the prompt's greedy one."""
        return "greedy_rewards" in self.variants["advantage"].tensors

    @property
    def reads_window(self) -> str:
        """What compares a token with all others of the window, as text; empty if nothing does."""
        return ", ".join(
            str(self.variants[axis])
            for axis, names in _OF_THE_WINDOW.items()
            if self.variants[axis].name in names
        )

    @property
    def needs_group(self) -> bool:
        """Whether a completion is compared with others of its prompt, so that two are needed."""
        return "groups" in self.variants["advantage"].tensors

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without aliases: what `GRPOConfig(**values)` makes an equal config of."""
        return vars(self) | {axis: variant.name for axis, variant in self.variants.items()}

    def _lacks(self, name: str) -> str:
        return f"nothing that this GRPOConfig chooses has a hyperparameter '{name}'"


ExperimentConfig = GRPOConfig


def _settings(
    chosen: Mapping[str, Variant], given: Mapping[str, float | str | None]
) -> dict[str, float | str | None]:
    """Every hyperparameter of the choices with its value.

    Raises:
        UserError: for one that nothing chosen reads.
    """
    # So that a file can list a value that only some choices read.
    given = {name: value for name, value in given.items() if value is not None}
    taken: dict[str, float | str | None] = {}
    for variant in chosen.values():
        taken |= variant.settings({n: v for n, v in given.items() if n in variant.hyperparameters})
    unused = given.keys() & _UNUSED.get(chosen["loss_fn"].name, set())
    if unread := given.keys() - taken.keys() - unused - _FACTS:
        names = sorted(unread)
        choices = ", ".join(str(variant) for variant in chosen.values())
        raise UserError(
            f"nothing that was chosen reads {', '.join(names)}: {choices} take "
            f"{', '.join(taken) or 'no hyperparameters'}. Take it out; on the command line, "
            + " ".join(f"~loss.{name}" for name in names)
        )
    return taken | {name: given[name] for name in sorted(unused)}


def _checked(name: str, value: Any, rule: Rule) -> Any:
    """The value, if it is one that may be."""
    if not rule.admits(value):
        raise UserError(f"{name} must be {rule}, not {value!r}")
    return value


def _reads_ratio(config: GRPOConfig, axis: str) -> bool:
    return "ratio" in config.variants[axis].tensors


def _divides(config: GRPOConfig) -> bool:
    """Whether the surrogate compares new probabilities with old ones."""
    return not {"ratio", "old_logprobs"}.isdisjoint(config.variants["loss_fn"].tensors)


# What does not go together: when, and why not.
_CLASHES: tuple[tuple[Callable[[GRPOConfig], bool], str], ...] = (
    (
        lambda config: config.ratio_level != "token" and not _reads_ratio(config, "loss_fn"),
        "loss_fn '{loss_fn}' reads no ratio, so that ratio_level '{ratio_level}' would change "
        "nothing: leave it at 'token', or choose a loss_fn that reads one",
    ),
    (
        lambda config: config.ratio_level != "token" and _reads_ratio(config, "kl_estimator"),
        "kl_estimator '{kl_estimator}' weighs each token by its own ratio, and ratio_level is "
        "'{ratio_level}': choose k2, whose gradient is as right without a ratio",
    ),
    (
        lambda config: config.kl_in == "reward" and _reads_ratio(config, "kl_estimator"),
        "kl_estimator '{kl_estimator}' needs the ratio of new to old probabilities, which is 1 "
        "when rewards are given: with kl_in 'reward' choose k1",
    ),
    (
        lambda config: (
            config.kl_in == "reward" and "rewards" not in config.variants["advantage"].tensors
        ),
        "advantage '{advantage}' reads each reward by its name, and kl_in 'reward' changes their "
        "sum: choose kl_in 'loss', or an advantage of the sum",
    ),
    (
        lambda config: (
            "tis_weights" in config.variants["loss_fn"].optional_tensors
            and config.correction in _OF_A_ROW
        ),
        "loss_fn '{loss_fn}' multiplies the weights of a completion's tokens, and correction "
        "'{correction}' repeats a weight of the whole: choose tis or icepop",
    ),
    (
        lambda config: (
            config.entropy_control == "target" and config.entropy_bonus > config.entropy_bonus_max
        ),
        "entropy_control 'target' starts from entropy_bonus, and {entropy_bonus:g} is above "
        "entropy_bonus_max {entropy_bonus_max:g}: lower the one or raise the other",
    ),
    (
        lambda config: (
            config.old_policy == "sampler" and config.correction != "none" and _divides(config)
        ),
        "loss_fn '{loss_fn}' divides by the sampler's probabilities where old_policy is 'sampler', "
        "and correction '{correction}' would do so once more: choose correction none, or loss_fn "
        "reinforce",
    ),
    (
        lambda config: (
            config.sampler_readers == "old_policy 'sampler'"
            and not (_divides(config) or _reads_ratio(config, "kl_estimator"))
        ),
        "loss_fn '{loss_fn}' reads no old log-probs, nor does anything else that was chosen, so "
        "that old_policy 'sampler' would change nothing: leave it at 'trainer'",
    ),
)


def _refuse_clashes(config: GRPOConfig) -> None:
    """Raise UserError for choices that do not go together; warn of one that does nothing."""
    for clash, reason in _CLASHES:
        if clash(config):
            raise UserError(reason.format(**vars(config)))
    # What a function's own hyperparameters may not be together, it says itself.
    one = torch.ones(1, 1, device="cpu")
    config.variants["loss_fn"](
        {
            name: one.bool() if name == "mask" else one
            for name in config.variants["loss_fn"].tensors
        },
        config,
    )
    config.variants["entropy_control"]({"coefficient": 0.0, "entropy": 0.0}, config)
    estimator = config.variants["kl_estimator"].name
    if config.reads_reference and config.kl_in == "loss" and estimator == "k1":
        warnings.warn(
            "k1 in the loss has an expected gradient of 0: it adds noise and pulls towards no "
            "reference. Choose kl_estimator 'k2' or 'ratio_k3', or kl_in 'reward'",
            stacklevel=3,
        )
