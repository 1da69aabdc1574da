"""Data: reading, tokenisation, batches, and the order they come in."""

from lit_align.data.completions import CompletionCollate, CompletionRows
from lit_align.data.loader import PairLoader
from lit_align.data.pairs import PairCollate, PairRows
from lit_align.data.preference import PreferenceDataModule
from lit_align.data.prompt_format import PromptFormat
from lit_align.data.prompt_loader import PromptLoader
from lit_align.data.prompts import Prompt, PromptRows, open_prompts
from lit_align.data.rollout import RolloutDataModule
from lit_align.data.tasks import (
    Arithmetic,
    HeldOutArithmetic,
    HeldOutReasoningGym,
    ReasoningGym,
)
from lit_align.data.unpaired import UnpairedDataModule

__all__ = [
    "Arithmetic",
    "CompletionCollate",
    "CompletionRows",
    "HeldOutArithmetic",
    "HeldOutReasoningGym",
    "PairCollate",
    "PairLoader",
    "PairRows",
    "PreferenceDataModule",
    "Prompt",
    "PromptFormat",
    "PromptLoader",
    "PromptRows",
    "ReasoningGym",
    "RolloutDataModule",
    "UnpairedDataModule",
    "open_prompts",
]
