"""Rewards: functions that score completions, and the suite that runs them."""

from lit_align.rewards.calls import in_process
from lit_align.rewards.gym import gym_score
from lit_align.rewards.length import length_penalty, soft_overlong
from lit_align.rewards.numeric import numeric_match
from lit_align.rewards.suite import RewardSuite, Scores
from lit_align.rewards.symbolic import math_match
from lit_align.rewards.text import completion_text, exact_match, format_match

__all__ = [
    "RewardSuite",
    "Scores",
    "completion_text",
    "exact_match",
    "format_match",
    "gym_score",
    "in_process",
    "length_penalty",
    "math_match",
    "numeric_match",
    "soft_overlong",
]
