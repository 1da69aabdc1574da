"""What a policy loss asks of sampling and of data, said before anything is loaded."""

from typing import Any

from lit_align.errors import UserError
from lit_align.losses import GRPOConfig
from lit_align.rollout import RolloutPlan, Sampling


def check_loss(loss: GRPOConfig, sampling: Sampling) -> None:
    """Raise UserError for a loss that the module cannot give what it reads.

    Args:
        loss: its config.
        sampling: how completions to train on are sampled.
    """
    if loss.reads_sampler and not sampling.is_full:
        raise UserError(
            f"{loss.sampler_readers} compares the probabilities that tokens were drawn with, and "
            "top_p, top_k or min_p leave tokens out of the sampler's distribution only: sample "
            "with top_p=1, top_k=0, min_p=0, or without a correction (correction=none, "
            "token_filter=none, old_policy=trainer)"
        )


def check_data(loss: GRPOConfig, data: Any) -> None:
    """Raise UserError for data that the loss cannot learn from.

    Args:
        loss: its config.
        data: that of a trainer, or None.
    """
    if getattr(data, "num_generations", None) == 1 and loss.needs_group:
        raise UserError(
            f"advantage '{loss.advantage}' compares the completions of a prompt with each "
            "other, and data.num_generations is 1: take at least 2"
        )
    plan: RolloutPlan | None = getattr(data, "plan", None)
    if plan is None:
        return
    if plan.steps > 1 and not loss.reads_ratio:
        raise UserError(
            f"loss_fn '{loss.loss_fn}' has no ratio, so that it is right only until the "
            f"policy moves, and a rollout serves {plan.steps} steps: set "
            "data.steps_per_rollout and data.num_iterations to 1, or choose another loss_fn"
        )
