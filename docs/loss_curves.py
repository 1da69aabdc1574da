"""Points of the plots: a loss and its slopes, one pair, completion or token at a time.

The numbers are those of the package, called as it is: nothing here knows a formula. What a loss
reads besides the quantity on the axis is held at the values below; `held` says so to readers.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_align.losses import Variant

POINTS = 81
LENGTH = 20  # tokens of every response
OLD_PROBABILITY = 0.22
RATIOS = (0.02, 4.5)
# How far the axis goes to both sides of 0, in nats: far enough to see a slope change.
BETAS = 6.0  # over beta
LEAST = 10.0
OF_MEANS = 2.0  # nats per token
# But less for what grows with a ratio of probabilities, and more to see a lead that is to be
# reached.
REACHES = {
    "chi_po": 10.0,
    "dpo_alpha": 10.0,
    "dpo_forward_kl": 10.0,
    "dpo_js": 20.0,
    "ipo": 10.0,
    "ipo_sum": 10.0,
}
# What a pair, a completion or a token has besides log-probs, lengths and ratios.
HELD = {"margin": 2.0, "kl": 0.0, "draws": 0.0}
OF_THE_WINDOW = {"kl"}

Loss = Callable[[float], tuple[Tensor, list[Tensor]]]


class Curves(NamedTuple):
    """What one picture shows, float64.

    Attributes:
        axis: what `at` is, with its unit.
        at: the places, ascending.
        losses: values by legend.
        slopes: derivatives by legend.
    """

    axis: str
    at: list[float]
    losses: dict[str, list[float]]
    slopes: dict[str, list[float]]


def held() -> str:
    """At which values the plots hold what is not on an axis."""
    others = ", ".join(f"`{name}` {value:g}" for name, value in HELD.items())
    return (
        f"Plots of pairs: the two responses make up the margin in equal parts, one by gaining and "
        f"one by losing; the reference finds both equally likely, at minus the axis's reach, and "
        f"so do terms of alignment; each has {LENGTH} tokens, and the prompt none. Plots of "
        f"tokens: a completion of one token, to which the old policy gave a probability of "
        f"{OLD_PROBABILITY:g}. Held besides: {others}. What need not be given is not, and "
        f"hyperparameters have their defaults. Slopes are derivatives by the policy's log-prob, so "
        f"that a negative one makes more likely what it is of."
    )


def of_pairs(variant: Variant) -> Curves:
    """A loss of pairs against the margin of the log-probs it reads."""
    settings = variant.settings({})
    return against_margin(variant.name, [(1.0, variant, settings)], means=variant.average_logps)


def of_combination(name: str, config: Any) -> Curves:
    """A weighted sum of losses against the margin of sums."""
    terms = [(term.weight, term.config.variant, settings(term)) for term in config.terms.values()]
    return against_margin(name, terms, means=False)


def settings(term: Any) -> dict[str, Any]:
    """The hyperparameters of one loss of a sum."""
    names = term.config.variant.hyperparameters
    return {name: value for name, value in term.config.as_dict().items() if name in names}


def against_margin(
    name: str, terms: list[tuple[float, Variant, dict[str, Any]]], *, means: bool
) -> Curves:
    """The weighted sum of some losses; sums are made means where only some of them read means."""
    reach = reach_of(name, [values.get("beta") for _, _, values in terms], means=means)

    def loss(at: float) -> tuple[Tensor, list[Tensor]]:
        policy = [leaf(half - reach) for half in (at / 2, -at / 2)]
        total = torch.zeros(1, dtype=torch.float64)
        for weight, variant, values in terms:
            share = LENGTH if variant.average_logps and not means else 1
            read = {n: of_pair(n, policy, -reach, share) for n in named(variant)}
            total = total + weight * variant.fn(**read, **values).losses
        return total, policy

    kind, unit = ("means", "nats per token") if means else ("sums", "nats")
    axis = f"margin of {kind}, {unit}"
    return curves(axis, places(-reach, reach), {"loss": loss}, ("by the preferred", "by the other"))


def reach_of(name: str, betas: list[Any], *, means: bool = False) -> float:
    """How far the axis goes to both sides, nats."""
    if means:
        return REACHES.get(name, OF_MEANS)
    given = [beta for beta in betas if beta]
    return REACHES.get(name, max(LEAST, BETAS / given[0]) if given else LEAST)


def of_pair(name: str, policy: list[Tensor], level: float, share: int) -> Tensor:
    """What a tensor of that name is of one pair whose responses have these log-probs."""
    if name.endswith("_lengths"):
        return torch.tensor([0 if "prompt" in name else LENGTH])
    if "_prompt_" in name:
        return number(0.0)
    if name.startswith("policy_"):
        return policy["rejected" in name] / share
    if name.startswith("reference_") or name.endswith("_alignment_logps"):
        return number(level / share)
    return at_its_value(name)


def of_completions(variant: Variant) -> Curves:
    """A loss of single completions against the log-ratio, one desirable and one not."""
    values = variant.settings({})
    reach = reach_of(variant.name, [values.get("beta")])

    def loss_of(label: str) -> Loss:
        def loss(at: float) -> tuple[Tensor, list[Tensor]]:
            policy = leaf(at - reach)
            given = {"policy_logps": policy, "reference_logps": number(-reach)}
            given["labels"] = torch.tensor([label == "desirable"])
            read = {n: given[n] if n in given else at_its_value(n) for n in named(variant)}
            return variant.fn(**read, **values).losses, [policy]

        return loss

    losses = {label: loss_of(label) for label in ("desirable", "undesirable")}
    return curves("log-ratio to the reference, nats", places(-reach, reach), losses, ("",))


def of_surrogate(variant: Variant) -> Curves:
    """A surrogate against the ratio, for a good token and a bad one."""
    values = variant.settings({})

    def loss_of(advantage: float) -> Loss:
        def loss(ratio: float) -> tuple[Tensor, list[Tensor]]:
            given = of_token(ratio, advantage)
            read = {n: given[n] if n in given else at_its_value(n)[None] for n in variant.tensors}
            return variant.fn(**read, **values).losses, [given["new_logprobs"]]

        return loss

    losses = {"advantage +1": loss_of(1.0), "advantage \N{MINUS SIGN}1": loss_of(-1.0)}
    return curves("ratio of new to old probability", places(*RATIOS), losses, ("",))


def of_token(ratio: float, advantage: float) -> dict[str, Tensor]:
    """What a completion of one token is, (1, 1) each."""
    old = number(OLD_PROBABILITY).log()[None]
    new = (old + number(ratio).log()).requires_grad_()
    return {
        "new_logprobs": new,
        "old_logprobs": old,
        "ratio": (new - old).exp(),
        "advantages": torch.full_like(old, advantage),
        "mask": torch.ones_like(old, dtype=torch.bool),
    }


def named(variant: Variant) -> tuple[str, ...]:
    """The tensors that a loss is given: those it needs, and terms of alignment, which weigh 1."""
    optional = (name for name in variant.optional_tensors if name.endswith("_alignment_logps"))
    return (*variant.tensors, *optional)


def at_its_value(name: str) -> Tensor:
    """What is not on the axis."""
    if name not in HELD:
        raise ValueError(f"docs/loss_curves.py: say in HELD at which value to hold '{name}'")
    value = number(HELD[name])
    return value.squeeze() if name in OF_THE_WINDOW else value


def curves(
    axis: str, at: list[float], losses: Mapping[str, Loss], parts: tuple[str, ...]
) -> Curves:
    """Values and derivatives, each loss by each of the tensors it returns."""
    drawn = Curves(axis, at, {}, {})
    for legend, loss in losses.items():
        rows = [point(loss, place) for place in at]
        drawn.losses[legend] = [value for value, _ in rows]
        for which, part in enumerate(parts):
            drawn.slopes[part or legend] = [slopes[which] for _, slopes in rows]
    return drawn


def point(loss: Loss, place: float) -> tuple[float, list[float]]:
    """A value, and its derivatives."""
    value, leaves = loss(place)
    slopes = torch.autograd.grad(value.sum(), leaves, materialize_grads=True)
    return value.item(), [slope.item() for slope in slopes]


def places(first: float, last: float) -> list[float]:
    """Evenly from one to the other, ends included."""
    return torch.linspace(first, last, POINTS, dtype=torch.float64).tolist()


def leaf(value: float) -> Tensor:
    """What is differentiated by, (1,)."""
    return number(value).requires_grad_()


def number(value: float) -> Tensor:
    """Of one pair or completion, (1,)."""
    return torch.tensor([value], dtype=torch.float64)
