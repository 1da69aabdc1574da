"""The one way from a batch to log-probabilities: policy and reference, training and cache."""

from lit_align.logprobs.attention import plain_attention
from lit_align.logprobs.budget import Item, Ways, balance, fill, tokens_of, ways
from lit_align.logprobs.causal_lm import base_model, eval_mode
from lit_align.logprobs.head import Alignment, TokenTerms, token_terms
from lit_align.logprobs.layouts import Layout
from lit_align.logprobs.response import ResponseLogprobs, response_logprobs
from lit_align.logprobs.verify import verify_head

__all__ = [
    "Alignment",
    "Item",
    "Layout",
    "ResponseLogprobs",
    "TokenTerms",
    "Ways",
    "balance",
    "base_model",
    "eval_mode",
    "fill",
    "plain_attention",
    "response_logprobs",
    "token_terms",
    "tokens_of",
    "verify_head",
    "ways",
]
