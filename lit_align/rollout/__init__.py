"""From prompts to what is learnt from: engines that answer, a loader that cuts answers up."""

from lit_align.rollout.collect import Completer, collect, is_informative
from lit_align.rollout.engine import (
    Completion,
    Engine,
    Request,
    Sampling,
    sample_seed,
    stop_token_ids,
)
from lit_align.rollout.huggingface import HuggingFaceEngine, context_length
from lit_align.rollout.loader import RolloutLoader
from lit_align.rollout.plan import RolloutPlan
from lit_align.rollout.replay import ReplayEngine
from lit_align.rollout.rows import Drawn, Rollout, Sample, grouped
from lit_align.rollout.stream import PromptStream
from lit_align.rollout.summary import rollout_metrics

__all__ = [
    "Completer",
    "Completion",
    "Drawn",
    "Engine",
    "HuggingFaceEngine",
    "PromptStream",
    "ReplayEngine",
    "Request",
    "Rollout",
    "RolloutLoader",
    "RolloutPlan",
    "Sample",
    "Sampling",
    "collect",
    "context_length",
    "grouped",
    "is_informative",
    "rollout_metrics",
    "sample_seed",
    "stop_token_ids",
]
