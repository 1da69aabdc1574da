"""Before the first step the policy is the reference: do the numbers say so?

What this finds has cost others whole runs: a cache of other weights, a precision that training does
not use, dropout in the reference, an adapter that was not fresh, means compared with sums.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from lit_align.callbacks.reference_source import floating_dtype
from lit_align.modules.comparing import ComparingModule
from lit_align.modules.inference import inference

# In low precision a single logit is off by up to 1/8 nat, which a short response does not average
# out: every response may differ as if it had this many tokens more.
_EXTRA_TOKENS = 4


class Start(NamedTuple):
    """The first micro-batch before the first step, each (B,): as it is and as it should be."""

    rows: Tensor  # index in the data set
    difference: Tensor  # of the log-probs of policy and reference, nats, the worst of all sides
    allowed: Tensor  # of that, nats
    loss: Tensor
    expected_loss: Tensor  # of a policy that equals the reference
    allowed_loss: Tensor  # by how much differences that are allowed may change the loss
    reward: Tensor  # of a policy that equals the reference, the worst of all sides; should be 0
    allowed_reward: Tensor

    def fault(self) -> str | None:
        """What is wrong, in a few sentences; None if nothing is."""
        # Written so that a NaN is a fault.
        good = self.difference <= self.allowed
        good &= (self.loss - self.expected_loss).abs() <= self.allowed_loss
        good &= self.reward <= self.allowed_reward
        if good.all():
            return None
        values = {name: part[~good][0].item() for name, part in self._asdict().items()}
        return (
            "before the first step the policy must agree with its reference. In row {rows} their "
            "log-probs differ by {difference:.3g} nats (allowed: {allowed:.3g}) and the loss is "
            "{loss:.6f} instead of {expected_loss:.6f}; were they equal, the rewards would be "
            "{reward:.3g} instead of 0"
        ).format(**values)


def check_start(
    trainer: L.Trainer, module: ComparingModule, batch: Mapping[str, Tensor]
) -> str | None:
    """What is wrong with the policy or its reference before the first step; None: nothing."""
    with inference(trainer, module.policy):
        logps = module.response_logps(batch)
        reference = _replaced(logps, module.reference_rows(batch))
        start = _start(module, batch, logps, reference, tolerance(trainer, module))
    mask = batch.get("pair_mask", torch.ones_like(batch["index"], dtype=torch.bool))
    return Start(*(part[mask] for part in start)).fault()


def tolerance(trainer: L.Trainer, module: ComparingModule) -> float:
    """By how much the log-prob of a token may differ between two batches that hold it, in nats."""
    dtype = floating_dtype(module.policy)
    if "16" in str(trainer.precision) or dtype in (torch.float16, torch.bfloat16):
        return 5e-2
    if torch.get_float32_matmul_precision() != "highest":
        return 1e-2
    return 1e-8 if dtype == torch.float64 else 1e-4


def _replaced(logps: Any, reference: Mapping[str, Tensor]) -> Any:
    """What the policy's log-probs should be: those of the reference, of all that are of one."""
    named = {name: reference.get(f"reference_{name}_logps") for name in logps._fields}
    return logps._replace(**{name: sums for name, sums in named.items() if sums is not None})


def _start(
    module: ComparingModule,
    batch: Mapping[str, Tensor],
    logps: Any,
    reference: Any,
    per_token: float,
) -> Start:
    """The comparison, for all rows of the batch."""
    slack = {
        side: per_token * (getattr(logps, f"{side}_lengths") + _EXTRA_TOKENS)
        for side in module.asked_sides
    }
    off = {side: (getattr(logps, side) - getattr(reference, side)).abs() for side in slack}
    worst = torch.stack([off[side] / slack[side] for side in slack]).argmax(0, keepdim=True)
    equal = _loss_of(module, batch, reference)
    # How far loss and rewards may be off depends on the loss: ask it at the corners of what is
    # allowed.
    corners = [
        _loss_of(module, batch, _moved(reference, slack, signs))
        for signs in itertools.product((-1, 1), repeat=len(slack))
    ]
    return Start(
        rows=batch["index"],
        difference=torch.stack([*off.values()]).gather(0, worst)[0],
        allowed=torch.stack([*slack.values()]).gather(0, worst)[0],
        loss=_loss_of(module, batch, logps).losses,
        expected_loss=equal.losses,
        allowed_loss=_farthest([corner.losses - equal.losses for corner in corners]),
        reward=_farthest(equal[1:]) * module.rewards_are_relative,
        allowed_reward=_farthest([corner[1] - equal[1] for corner in corners]),
    )


def _loss_of(module: ComparingModule, batch: Mapping[str, Tensor], logps: Any) -> Any:
    """The loss of each row; if it compares them with each other, of each the mean over all.

    Which rank or lot falls to which row, differences that are allowed may decide.
    """
    found = module.response_loss(batch, logps)
    if not module.needs_window:
        return found
    return found._replace(losses=found.losses.mean().expand_as(found.losses))


def _moved(logps: Any, slack: Mapping[str, Tensor], signs: Sequence[int]) -> Any:
    """Log-probs off by so much, up or down; what is off is so in the head already."""
    moved = {
        name: getattr(logps, name) + sign * by
        for (side, by), sign in zip(slack.items(), signs, strict=True)
        for name in (side, f"{side}_head")
        if getattr(logps, name, None) is not None
    }
    return logps._replace(**moved)


def _farthest(values: Sequence[Tensor]) -> Tensor:
    """The largest distance from 0, (B,)."""
    return torch.stack([value.abs() for value in values]).amax(0)
