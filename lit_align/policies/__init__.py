"""Policies: where they come from, how an adapter hangs on them, and how they are saved."""

from lit_align.policies.adapters import has_adapter, reference_mode
from lit_align.policies.fingerprint import policy_fingerprint
from lit_align.policies.recipe import PolicyRecipe
from lit_align.policies.saving import save_policy
from lit_align.policies.source import BUNDLED

__all__ = [
    "BUNDLED",
    "PolicyRecipe",
    "has_adapter",
    "policy_fingerprint",
    "reference_mode",
    "save_policy",
]
