"""From a rollout of which everything is known to the advantages of its completions."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_align.losses import GRPOConfig, advantages
from lit_align.rollout import Sample


def give_advantages(
    loss: GRPOConfig, samples: Sequence[Sample], reward_weights: Mapping[str, float]
) -> None:
    """Let every sample know its advantage, and those of its tokens if they have their own.

    Args:
        loss: its config.
        samples: of whole groups, the same on every rank.
        reward_weights: of each reward in the sum.
    """
    rewards, groups = shaped_rewards(loss, samples), torch.tensor([s.group for s in samples])
    given = advantages(loss, rewards, groups, **_others(loss, samples, reward_weights))
    for sample, advantage in zip(samples, given, strict=True):
        if advantage.dim():
            sample.token_advantages = advantage[: len(sample.completion_ids)].tolist()
        of_tokens = sample.token_advantages or [float(advantage)]
        sample.advantage = sum(of_tokens) / len(of_tokens)


def shaped_rewards(loss: GRPOConfig, samples: Sequence[Sample]) -> Tensor:
    """The rewards that advantages are made of, (N,): less beta times the KL, if it belongs there.

    A completion is rewarded as a whole, and so is its KL: the sum over its tokens.
    """
    rewards = _column([s.reward for s in samples])
    if loss.kl_in == "reward" and loss.reads_reference:
        rewards = rewards - loss.beta * torch.stack([_kl(loss, s) for s in samples])
    return rewards


def _others(
    loss: GRPOConfig, samples: Sequence[Sample], reward_weights: Mapping[str, float]
) -> dict[str, Tensor]:
    """What advantages read beside rewards and groups, as far as this one does."""
    others = {
        "lengths": torch.tensor([len(s.completion_ids) for s in samples]),
        "greedy_rewards": _column([s.greedy_reward for s in samples]),
    }
    if "rewards_by_name" in loss.variants["advantage"].tensors:
        rows = [[_number(s.rewards[name]) for name in reward_weights] for s in samples]
        others["rewards_by_name"] = torch.tensor(rows, dtype=torch.float64)
        others["reward_weights"] = _column([*reward_weights.values()])
    if loss.reads_alignment:
        others |= {
            name: pad_sequence([_column(getattr(s, name)) for s in samples], batch_first=True)
            for name in ("old_logprobs", "alignment")
        }
        positions = torch.arange(others["alignment"].shape[1])
        others["mask"] = positions < others["lengths"].unsqueeze(-1)
    return others


def _kl(loss: GRPOConfig, sample: Sample) -> Tensor:
    """Estimate of the KL between policy and reference on one completion, nats."""
    old, ref = (_column(getattr(sample, n)) for n in ("old_logprobs", "ref_logprobs"))
    given = {"new_logprobs": old.unsqueeze(0), "ref_logprobs": ref.unsqueeze(0)}
    estimate: Tensor = loss.variants["kl_estimator"](given, loss)
    return estimate.sum()


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _number(reward: float | None) -> float:
    """NaN for a reward that does not apply."""
    return float("nan") if reward is None else reward
