"""Before the first step the policy is the reference: do the numbers say so?

What this finds has cost others whole runs: a cache of other weights, a precision that training does
not use, dropout in the reference, an adapter that was not fresh, means compared with sums.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import lightning as L
import torch
from torch import Tensor

from lit_align.callbacks.reference_source import floating_dtype
from lit_align.modules import DPOModule
from lit_align.modules.dpo import PairLogps, pair_mask
from lit_align.modules.inference import inference

# In low precision a single logit is off by up to 1/8 nat, which a short response does not average
# out: every response may differ as if it had this many tokens more.
_EXTRA_TOKENS = 4


class Start(NamedTuple):
    """The first micro-batch before the first step, each (B,): as it is and as it should be."""

    rows: Tensor  # index in the data set
    difference: Tensor  # of the log-probs of policy and reference, nats, the worse of both sides
    allowed: Tensor  # of that, nats
    loss: Tensor
    expected_loss: Tensor  # of a policy that equals the reference
    allowed_loss: Tensor  # by how much differences that are allowed may change the loss
    reward: Tensor  # of a policy that equals the reference, the worse of both sides; should be 0
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


def check_start(trainer: L.Trainer, module: DPOModule, batch: Mapping[str, Tensor]) -> str | None:
    """What is wrong with the policy or its reference before the first step; None: nothing."""
    with inference(trainer, module.policy):
        logps = module.pair_logps(batch)
        reference = _reference_logps(module, batch, logps)
        start = _start(module, batch, logps, reference, tolerance(trainer, module))
    return Start(*(part[pair_mask(batch)] for part in start)).fault()


def tolerance(trainer: L.Trainer, module: DPOModule) -> float:
    """By how much the log-prob of a token may differ between two batches that hold it, in nats."""
    dtype = floating_dtype(module.policy)
    if "16" in str(trainer.precision) or dtype in (torch.float16, torch.bfloat16):
        return 5e-2
    if torch.get_float32_matmul_precision() != "highest":
        return 1e-2
    return 1e-8 if dtype == torch.float64 else 1e-4


def _reference_logps(module: DPOModule, batch: Mapping[str, Tensor], logps: PairLogps) -> PairLogps:
    """What the policy's log-probs should be, as sums, whatever the cache holds."""
    assert module.reference_cache is not None
    rows = module.reference_cache[batch["index"]]
    chosen, rejected = rows["chosen_logps"], rows["rejected_logps"]
    if module.loss.variant.average_logps:
        chosen = chosen * logps.chosen_lengths
        rejected = rejected * logps.rejected_lengths
    return logps._replace(chosen=chosen, rejected=rejected)


def _start(
    module: DPOModule,
    batch: Mapping[str, Tensor],
    logps: PairLogps,
    reference: PairLogps,
    per_token: float,
) -> Start:
    """The comparison, for all rows of the batch."""
    chosen_slack = per_token * (logps.chosen_lengths + _EXTRA_TOKENS)
    rejected_slack = per_token * (logps.rejected_lengths + _EXTRA_TOKENS)
    chosen_off = (logps.chosen - reference.chosen).abs()
    rejected_off = (logps.rejected - reference.rejected).abs()
    worse = rejected_off / rejected_slack > chosen_off / chosen_slack
    equal = module.pair_loss(batch, reference)
    # How far loss and rewards may be off depends on the loss: ask it at the corners of what is
    # allowed.
    corners = [
        module.pair_loss(
            batch,
            reference._replace(
                chosen=reference.chosen + up * chosen_slack,
                rejected=reference.rejected + down * rejected_slack,
            ),
        )
        for up, down in itertools.product((-1, 1), repeat=2)
    ]
    return Start(
        rows=batch["index"],
        difference=torch.where(worse, rejected_off, chosen_off),
        allowed=torch.where(worse, rejected_slack, chosen_slack),
        loss=module.pair_loss(batch, logps).losses,
        expected_loss=equal.losses,
        allowed_loss=_farthest([corner.losses - equal.losses for corner in corners]),
        reward=_farthest([equal.chosen_rewards, equal.rejected_rewards]),
        allowed_reward=_farthest(
            [corner.chosen_rewards - equal.chosen_rewards for corner in corners]
        ),
    )


def _farthest(values: Sequence[Tensor]) -> Tensor:
    """The largest distance from 0, (B,)."""
    return torch.stack([value.abs() for value in values]).amax(0)
