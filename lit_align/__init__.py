"""Alignment of language models as components for PyTorch Lightning.

The names below are loaded when they are first used: `import lit_align.losses` needs torch alone,
and the command line can complete an option without importing it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_align.callbacks import BeforeAfter as BeforeAfter
    from lit_align.callbacks import ExactMatch as ExactMatch
    from lit_align.callbacks import Plan as Plan
    from lit_align.callbacks import ReferenceCache as ReferenceCache
    from lit_align.callbacks import ReferenceRefresh as ReferenceRefresh
    from lit_align.callbacks import RolloutLog as RolloutLog
    from lit_align.callbacks import SavePolicy as SavePolicy
    from lit_align.callbacks import StopOnSignal as StopOnSignal
    from lit_align.callbacks import ValidateAtEnd as ValidateAtEnd
    from lit_align.data import PreferenceDataModule as PreferenceDataModule
    from lit_align.data import RolloutDataModule as RolloutDataModule
    from lit_align.data import UnpairedDataModule as UnpairedDataModule
    from lit_align.errors import UserError as UserError
    from lit_align.losses import CombinedConfig as CombinedConfig
    from lit_align.losses import DPOConfig as DPOConfig
    from lit_align.losses import GRPOConfig as GRPOConfig
    from lit_align.losses import UnpairedConfig as UnpairedConfig
    from lit_align.modules import DPOModule as DPOModule
    from lit_align.modules import GRPOModule as GRPOModule
    from lit_align.modules import UnpairedModule as UnpairedModule
    from lit_align.policies import PolicyRecipe as PolicyRecipe
    from lit_align.rewards import RewardSuite as RewardSuite

_HOMES = {
    "BeforeAfter": "callbacks",
    "CombinedConfig": "losses",
    "DPOConfig": "losses",
    "DPOModule": "modules",
    "ExactMatch": "callbacks",
    "GRPOConfig": "losses",
    "GRPOModule": "modules",
    "Plan": "callbacks",
    "PolicyRecipe": "policies",
    "PreferenceDataModule": "data",
    "ReferenceCache": "callbacks",
    "ReferenceRefresh": "callbacks",
    "RewardSuite": "rewards",
    "RolloutDataModule": "data",
    "RolloutLog": "callbacks",
    "SavePolicy": "callbacks",
    "StopOnSignal": "callbacks",
    "UnpairedConfig": "losses",
    "UnpairedDataModule": "data",
    "UnpairedModule": "modules",
    "UserError": "errors",
    "ValidateAtEnd": "callbacks",
}

__all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lit_align' has no attribute '{name}'")
    return getattr(import_module(f"lit_align.{_HOMES[name]}"), name)
