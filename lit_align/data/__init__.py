"""Preference data: reading, tokenisation, batches, and the order they come in."""

from lit_align.data.loader import PairLoader
from lit_align.data.pairs import PairCollate, PairRows
from lit_align.data.preference import PreferenceDataModule

__all__ = ["PairCollate", "PairLoader", "PairRows", "PreferenceDataModule"]
