"""The live policy answers for itself, in this process."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lit_align.errors import UserError
from lit_align.logprobs import base_model, eval_mode
from lit_align.rollout.decoding import Place, Prompt, batches, decode
from lit_align.rollout.engine import Completion, Request, Sampling
from lit_align.rollout.forward import Forward
from lit_align.rollout.sharing import sharing


class HuggingFaceEngine:
    """Decodes with the model in training: no copy of the weights, no other numerics.

    A completion depends on the weights, its prompt, its seed and the sampling alone (up to the
    rounding of matrix products, which may differ with the batch's shape), not on what else is asked
    for nor on any random state. The caller chooses the precision context.

    Args:
        batch_size: completions decoded at once, >= 1: more memory, fewer passes.
    """

    in_process = True
    is_live = True

    def __init__(self, batch_size: int = 64) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise UserError(f"batch_size must be a whole number >= 1, not {batch_size!r}")
        self.batch_size = batch_size
        self.version: int | None = None
        self._policy: nn.Module | None = None

    def sync_weights(self, version: int, policy: nn.Module) -> None:
        """Bind the live policy: its weights are always its newest."""
        self.version = version
        self._policy = policy

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """See `Engine`.

        Raises:
            UserError: if a prompt is empty or fills the context, or the log-probs are not finite.
            RuntimeError: without weights.
        """
        if self._policy is None:
            raise RuntimeError("generate needs sync_weights before it: there is no policy yet")
        config: Any = base_model(self._policy).config
        prompts = _distinct_prompts(requests, sampling, context_length(config))
        found: dict[tuple[int, int], Completion] = {}
        forward = Forward(self._policy)
        shares = sharing(self._policy, forward)
        with eval_mode(self._policy):
            for batch in batches(prompts, self.batch_size):
                start = shares.start(max(len(prompt.ids) + prompt.room for prompt in batch))
                for place, completion in decode(forward, batch, start, sampling, self.batch_size):
                    found[place.request, place.sample] = completion
            forward.wait_for_others()
        _check_finite(found.values())
        return [
            [found[n, sample] for sample in range(len(request.samples))]
            for n, request in enumerate(requests)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: every draw follows from its own seed."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Let go of the policy."""
        self._policy = None
        self.version = None


def context_length(config: Any) -> int | None:
    """How many tokens a model takes at most, as its configuration says; None: it does not say."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _distinct_prompts(
    requests: Sequence[Request], sampling: Sampling, context: int | None
) -> list[Prompt]:
    """Each prompt once, with all completions wanted of it; the longest first.

    Neighbours are then about as long, so little is padding; and memory that does not suffice fails
    at the beginning.
    """
    places: dict[tuple[int, ...], list[Place]] = {}
    for n, request in enumerate(requests):
        if len(request.seeds) != len(request.samples):
            raise ValueError(
                f"request {n} has {len(request.seeds)} seeds for {len(request.samples)} samples"
            )
        wanted = [Place(n, sample, seed) for sample, seed in enumerate(request.seeds)]
        places.setdefault(tuple(request.prompt_ids), []).extend(wanted)
    prompts = [
        Prompt(ids, wanted, _room(len(ids), context, sampling.max_new_tokens))
        for ids, wanted in places.items()
        if wanted
    ]
    return sorted(prompts, key=lambda prompt: len(prompt.ids), reverse=True)


def _room(length: int, context: int | None, most: int) -> int:
    """How many tokens a completion may have: `most`, unless the context ends before."""
    if length == 0:
        raise UserError("a prompt has no token: an answer must have something to follow")
    if context is not None and length >= context:
        raise UserError(
            f"a prompt of {length} tokens leaves no room for an answer: the model's context is "
            f"{context} tokens; drop or shorten such prompts"
        )
    return most if context is None else min(most, context - length)


def _check_finite(completions: Any) -> None:
    for completion in completions:
        if not all(map(math.isfinite, completion.logprobs)):
            raise UserError(
                "the policy's log-probs are not finite: its weights have diverged; lower the "
                "learning rate or clip the gradients"
            )
