"""Pairs for hypothesis, and tensors of few numbers."""

import torch
from hypothesis import strategies as st

LOGP = st.floats(-50, 0)
PAIRS = st.lists(st.tuples(LOGP, LOGP, LOGP, LOGP), min_size=1, max_size=4)
BETA = st.floats(0.01, 2)
SMOOTHING = st.floats(0, 0.49)


def columns(rows):
    """The columns of a table, float64: log-probs of policy (w, l), then of the reference."""
    return torch.tensor(rows, dtype=torch.float64).T.unbind()


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def pair(log_ratio_w, log_ratio_l):
    """One pair with these log-ratios; the reference's log-probs are -9 and -7."""
    return columns([(log_ratio_w - 9.0, log_ratio_l - 7.0, -9.0, -7.0)])


def slopes(loss, log_ratio_w, log_ratio_l, **options):
    """Derivatives of the loss by the policy's two log-probs."""
    policy_w, policy_l, *reference = pair(log_ratio_w, log_ratio_l)
    leaves = policy_w.requires_grad_(), policy_l.requires_grad_()
    losses = loss(*leaves, *reference, **options).losses
    return torch.autograd.grad(losses.sum(), leaves)
