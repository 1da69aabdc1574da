"""From prompts to what is learnt from: engines that answer, a loader that cuts answers up."""

from lit_align.rollout.batches import with_window
from lit_align.rollout.collect import (
    Completer,
    collect,
    compare_with_greedy,
    is_informative,
)
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
from lit_align.rollout.rows import GREEDY, Drawn, Rollout, Sample, grouped
from lit_align.rollout.stream import PromptStream
from lit_align.rollout.summary import rollout_metrics

__all__ = [
    "GREEDY",
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
    "compare_with_greedy",
    "context_length",
    "grouped",
    "is_informative",
    "rollout_metrics",
    "sample_seed",
    "stop_token_ids",
    "with_window",
]
