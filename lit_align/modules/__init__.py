"""The LightningModules: a policy, a loss and nothing that Lightning already does."""

from lit_align.modules.dpo import DPOModule

__all__ = ["DPOModule"]
