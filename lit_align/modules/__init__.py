"""The LightningModules: a policy, a loss and nothing that Lightning already does."""

from lit_align.modules.dpo import DPOModule
from lit_align.modules.grpo import GRPOModule
from lit_align.modules.unpaired import UnpairedModule

__all__ = ["DPOModule", "GRPOModule", "UnpairedModule"]
