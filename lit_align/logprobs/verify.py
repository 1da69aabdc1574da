"""A check, before any training, that the log-probs taken here are those the model itself gives."""

import torch
from torch import nn

from lit_align.errors import UserError
from lit_align.logprobs.causal_lm import base_model, eval_mode
from lit_align.logprobs.head import token_terms
from lit_align.logprobs.response import response_logprobs

PROBE_TOKENS = 8
# Roundings, in units of the dtype's own, that two right ways to the same logits may differ by.
ROUNDINGS = 16


@torch.no_grad()
def verify_head(model: nn.Module) -> None:
    """Compare log-probs of a few tokens with those from the model's own logits.

    Some architectures scale, cap or mix their logits in ways of their own. What is not known here
    must stop the run: it would train on wrong numbers in silence.

    Args:
        model: a causal language model; runs in eval mode and gets its modes back.

    Raises:
        UserError: if the two differ by more than rounding.
    """
    base = base_model(model)
    device = next(model.parameters()).device
    ids = torch.arange(1, PROBE_TOKENS + 1, device=device).unsqueeze(0)
    ids = ids % base.config.get_text_config().vocab_size
    attention_mask = torch.ones_like(ids)
    with eval_mode(model):
        logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
        found = response_logprobs(model, ids, attention_mask, ids, layout="padded").logprobs
    expected = token_terms(logits[:, :-1], ids[:, 1:]).logprobs
    difference = float((found - expected).abs().max())
    allowed = ROUNDINGS * torch.finfo(logits.dtype).eps * max(1.0, float(logits.abs().max()))
    # Written so that NaN fails.
    if not difference <= allowed:
        raise UserError(
            f"{type(base).__name__} is not supported: its own log-probs differ from those of its "
            f"body and head by {difference:.2g} nats (rounding explains {allowed:.2g}), so it "
            "treats its logits in a way that is unknown here"
        )
