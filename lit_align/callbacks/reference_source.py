"""Where the reference comes from: which model it is, what identifies it, and how to get at it."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import lightning as L
import torch
from torch import nn

from lit_align.errors import UserError
from lit_align.logprobs import plain_attention
from lit_align.matmul import matmul_in_use
from lit_align.modules.comparing import ComparingModule
from lit_align.modules.sharding import shard
from lit_align.policies import PolicyRecipe, has_adapter, policy_fingerprint, reference_mode

# What a model's config says that no log-prob depends on.
_NOT_NUMERIC = {
    "_name_or_path",
    "architectures",
    "dtype",  # of the file; the one that computes stands beside the config
    "id2label",
    "label2id",
    "transformers_version",
    "use_cache",
}


class ReferenceSource:
    """The reference of a run: a second model, the base under an adapter, or the policy at step 0.

    Only the last can be lost, for training moves it. Then it is loaded anew or refused; a policy
    that has moved never stands in for it.

    Args:
        trainer: its strategy has set the policy up; a checkpoint may be restored already, or not.
        module: knows the policy, the second model if there is one, and how to load them.
        fingerprint_is_new: whether the policy's fingerprint was taken in this run, so that only a
            checkpoint can have moved the policy since.
    """

    def __init__(
        self, trainer: L.Trainer, module: ComparingModule, *, fingerprint_is_new: bool
    ) -> None:
        self.trainer = trainer
        self.module = module
        self.untouched = fingerprint_is_new and trainer.ckpt_path is None

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything the numbers depend on besides the response, as plain values.

        Loss, beta, learning rate, seed, batch size and folders are not among it: runs that differ
        in nothing else share the numbers.
        """
        if self.module.reference is None:
            return self._identify(self.module.policy, self.module.reference_fingerprint)
        identity: dict[str, Any] = {}
        if self.trainer.is_global_zero:
            model = self.module.reference.model()
            identity = self._identify(model, policy_fingerprint(model))
        return self.trainer.strategy.broadcast(identity)

    def _identify(self, model: Any, fingerprint: str) -> dict[str, Any]:
        # Rotary embeddings, logit scale, soft-cap, quantisation and the like, but for most of the
        # defaults: a newer transformers has more of those.
        config = model.config.to_diff_dict()
        return {
            "weights": fingerprint,
            # An adapter that is disabled computes what its base does.
            "adapter": "off",
            "precision": str(self.trainer.precision),
            "matmul": _matmul(),
            "dtype": str(floating_dtype(model)),
            "attention": plain_attention(model.config),
            "config": {key: config[key] for key in sorted(config.keys() - _NOT_NUMERIC)},
        }

    @cached_property
    def is_policy(self) -> bool:
        """Whether the policy as it stands, its adapter disabled if it has one, is the reference."""
        if self.module.reference is not None:
            return False
        # Asked also of a disabled adapter: what it trains besides (biases) would stay on.
        if self.untouched:
            return True
        return policy_fingerprint(self.module.policy) == self.module.reference_fingerprint

    @property
    def is_start_of_training(self) -> bool:
        """Whether the policy itself, its adapter enabled, ought to agree with the reference.

        A checkpoint that is restored later on, as it is under sharding, is not known here.
        """
        if self.trainer.ckpt_path is not None or not self.is_policy:
            return False
        return self.untouched or not has_adapter(self.module.policy)

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        """The reference, on its device and sharded like the policy, for the time of the context.

        Raises:
            UserError: if it cannot be had any more.
        """
        if self.is_policy:
            with reference_mode(self.module.policy):
                yield self.module.policy
            return
        recipe = self.module.reference or self.module.recipe
        if recipe is None:
            raise UserError(
                "rows are missing from the reference cache, and the reference, this policy before "
                "its first step, cannot be had any more: restore the cache folder, or give the "
                "module the folder or id that the policy was loaded from instead of the model"
            )
        yield self._load(recipe)

    def _load(self, recipe: PolicyRecipe) -> nn.Module:
        """A model beside the policy, treated as the strategy treats the policy."""
        model = recipe.model()
        if policy_fingerprint(model) != self.identity["weights"]:
            raise UserError(
                "rows are missing from the reference cache, and "
                f"'{recipe.pretrained}' no longer holds the weights that training began with: "
                "restore those weights or the cache folder"
            )
        if self.module.device_mesh is not None:
            shard(model, self.module.device_mesh)
        converted = self.trainer.precision_plugin.convert_module(model)
        return converted.to(self.trainer.strategy.root_device)


def _matmul() -> str:
    """How float32 matrices are multiplied."""
    precision = torch.get_float32_matmul_precision()
    return precision if matmul_in_use() == "default" else f"{precision}, {matmul_in_use()}"


def floating_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's weights."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
