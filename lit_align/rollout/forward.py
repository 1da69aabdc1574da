"""One call of the policy during decoding: keys and values from before in, the next logits out."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Cache

from lit_align.errors import UserError
from lit_align.logprobs import base_model
from lit_align.rollout.memory import Memory, attention_from_memory


class Forward:
    """The policy's own forward, so that adapters, wrappers and final scaling count.

    If the weights are sharded, a pass gathers them on all ranks together. Each rank therefore asks
    before each of its passes, and a rank that has finished runs empty ones until all have.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self.accepts = set(inspect.signature(base_model(policy).forward).parameters)
        self._cache_name = self._name_of_cache(type(base_model(policy)).__name__)
        self.config: Any = base_model(policy).config
        parameters = list(policy.parameters())
        self.device, self.dtype = parameters[0].device, parameters[0].dtype
        self._in_step = any(isinstance(parameter, DTensor) for parameter in parameters)

    def cached(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Logits of the last position, (B, V), after adding the tokens to the cache.

        Args:
            ids: the tokens to add, (B, S).
            mask: 1 for what is real of everything cached and added, (B, P + S).
            positions: of the tokens to add, (B, S).
            cache: of P positions; grows by S.
        """
        memory = {"use_cache": True, self._cache_name: cache}
        return self._in_turn(ids, mask, positions, logits_to_keep=1, **memory)[:, -1]

    def remembering(
        self, ids: Tensor, positions: Tensor, keep: int | Tensor, memory: Memory, **told: Any
    ) -> Tensor:
        """Logits of the positions to keep, (B, K, V), by attention to what the memory holds.

        Args:
            ids: the tokens to add, (B, S).
            positions: of these tokens, (B, S).
            keep: which of them: the last K, or these, (K,).
            memory: grows by them.
            told: what the attention is told beside.
        """
        # Four axes: a mask to be left alone. None is needed.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        told |= {"logits_to_keep": keep, "use_cache": False, "memory": memory}
        with attention_from_memory(self.config.get_text_config()):
            return self._in_turn(ids, mask, positions, **told)

    def wait_for_others(self) -> None:
        """Take part in the other ranks' passes until no rank has any left."""
        while self._in_step and self._anybody(works=False):
            one = torch.ones(1, 1, dtype=torch.long, device=self.device)
            self._run(one.new_zeros(1, 1), one, one.new_zeros(1, 1), use_cache=False)

    def _in_turn(self, ids: Tensor, mask: Tensor, positions: Tensor, **options: Any) -> Tensor:
        if self._in_step:
            self._anybody(works=True)
        return self._run(ids, mask, positions, **options)

    def _run(self, ids: Tensor, mask: Tensor, positions: Tensor, **options: Any) -> Tensor:
        optional = {"position_ids": positions, "logits_to_keep": options.pop("logits_to_keep", 1)}
        output: Any = self._policy(
            input_ids=ids,
            attention_mask=mask,
            **{name: value for name, value in optional.items() if name in self.accepts},
            **options,
        )
        logits: Tensor = output.logits
        return logits

    def _name_of_cache(self, model: str) -> str:
        # Models of the hub with code of their own keep the older name.
        for name in ("cache", "past_key_values"):
            if name in self.accepts:
                return name
        raise UserError(f"{model} takes no cache of transformers: it cannot generate in-process")

    def _anybody(self, *, works: bool) -> bool:
        """Whether any rank is about to run a pass."""
        flag = torch.tensor(int(works), device=self.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)
