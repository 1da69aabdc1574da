"""What runs beside training: the reference, the results, and what is shown of them."""

from lit_align.callbacks.before_after import BeforeAfter
from lit_align.callbacks.exact_match import ExactMatch
from lit_align.callbacks.plan import Plan, StepProgressBar
from lit_align.callbacks.reference_cache import ReferenceCache
from lit_align.callbacks.reference_refresh import ReferenceRefresh
from lit_align.callbacks.rollout_log import RolloutLog
from lit_align.callbacks.save_policy import SavePolicy
from lit_align.callbacks.stop_on_signal import StopOnSignal
from lit_align.callbacks.validate_at_end import ValidateAtEnd

__all__ = [
    "BeforeAfter",
    "ExactMatch",
    "Plan",
    "ReferenceCache",
    "ReferenceRefresh",
    "RolloutLog",
    "SavePolicy",
    "StepProgressBar",
    "StopOnSignal",
    "ValidateAtEnd",
]
