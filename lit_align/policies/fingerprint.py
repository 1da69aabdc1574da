"""A name for weights that changes when any of their bits does."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from lit_align.policies.adapters import base_names

# hashlib lets go of the interpreter lock; more threads than this wait for memory.
THREADS = 4


@torch.no_grad()
def policy_fingerprint(model: nn.Module) -> str:
    """SHA-256 of the reference weights: their names, shapes, dtypes and bytes.

    The reference is the model without its adapter, so a base and the same base under a LoRA
    adapter, fresh or trained, have one fingerprint. Tied weights count once. Sharded weights are
    gathered one after the other: all ranks must call this together, and all get the same.

    Returns:
        64 hexadecimal digits.
    """
    whole = hashlib.sha256()
    weights = sorted(_reference_weights(model).items())
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(weights), THREADS):
            # Few at a time: a sharded model does not fit into one process.
            few = [(name, _gathered(tensor)) for name, tensor in weights[start : start + THREADS]]
            for digest in pool.map(_digest, few):
                whole.update(digest)
    return whole.hexdigest()


def _reference_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of the reference by the base model's names, each once."""
    weights: dict[str, Tensor] = {}
    seen: set[int] = set()
    own = model.state_dict(keep_vars=True)
    for name, plain in base_names(model).items():
        if id(own[name]) not in seen:
            seen.add(id(own[name]))
            weights[plain] = own[name]
    return weights


def _gathered(tensor: Any) -> Tensor:
    """The whole of a tensor that may be sharded over ranks."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def _digest(named: tuple[str, Tensor]) -> bytes:
    """SHA-256 of one weight."""
    name, tensor = named
    dtype = str(tensor.dtype).rpartition(".")[-1]
    digest = hashlib.sha256(f"{name} {dtype} {list(tensor.shape)} ".encode())
    # numpy knows no bfloat16; the bytes are all that counts.
    digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
