"""One call of the policy during decoding: a cache in, the last position's logits out."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Cache

from lit_align.errors import UserError
from lit_align.logprobs import base_model


class Forward:
    """The policy's own forward, so that adapters, wrappers and final scaling count.

    If the weights are sharded, a pass gathers them on all ranks together. Each rank therefore asks
    before each of its passes, and a rank that has finished runs empty ones until all have.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self._accepts = set(inspect.signature(base_model(policy).forward).parameters)
        self._cache_name = self._name_of_cache(type(base_model(policy)).__name__)
        parameters = list(policy.parameters())
        self.device = parameters[0].device
        self._in_step = any(isinstance(parameter, DTensor) for parameter in parameters)

    def __call__(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Logits of the last position, (B, V), after adding the tokens to the cache.

        Args:
            ids: the tokens to add, (B, S).
            mask: 1 for what is real of everything cached and added, (B, P + S).
            positions: of the tokens to add, (B, S).
            cache: of P positions; grows by S.
        """
        if self._in_step:
            self._anybody(works=True)
        return self._run(ids, mask, positions, cache)

    def wait_for_others(self) -> None:
        """Take part in the other ranks' passes until no rank has any left."""
        while self._in_step and self._anybody(works=False):
            one = torch.ones(1, 1, dtype=torch.long, device=self.device)
            self._run(one.new_zeros(1, 1), one, one.new_zeros(1, 1), None)

    def _run(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache | None) -> Tensor:
        optional = {"position_ids": positions, "logits_to_keep": 1, self._cache_name: cache}
        output: Any = self._policy(
            input_ids=ids,
            attention_mask=mask,
            # Switched off in the configuration where gradient checkpointing is on.
            use_cache=cache is not None,
            **{name: value for name, value in optional.items() if name in self._accepts},
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _name_of_cache(self, model: str) -> str:
        # Models of the hub with code of their own keep the older name.
        for name in ("cache", "past_key_values"):
            if name in self._accepts:
                return name
        raise UserError(f"{model} takes no cache of transformers: it cannot generate in-process")

    def _anybody(self, *, works: bool) -> bool:
        """Whether any rank is about to run a pass."""
        flag = torch.tensor(int(works), device=self.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)
