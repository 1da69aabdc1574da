"""The one way from a batch to log-probabilities: policy and reference, training and cache."""

from lit_align.logprobs.causal_lm import base_model, eval_mode
from lit_align.logprobs.head import CHUNK_SIZE, Alignment, TokenTerms, token_terms
from lit_align.logprobs.padded import ResponseLogprobs, response_logprobs
from lit_align.logprobs.verify import verify_head

__all__ = [
    "CHUNK_SIZE",
    "Alignment",
    "ResponseLogprobs",
    "TokenTerms",
    "base_model",
    "eval_mode",
    "response_logprobs",
    "token_terms",
    "verify_head",
]
