"""One process of several, or for several runs: who speaks, and what a run leaves behind."""

import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

# What Lightning or a launcher sets to say which process of how many this is.
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)

# What a shell reports of a process that SIGTERM ended.
TERMINATED = 128 + signal.SIGTERM


def is_first_rank() -> bool:
    """Whether this process speaks for all; known before Lightning is there to ask."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
    return all(os.environ.get(name, "0") == "0" for name in ranks)


def wait_for_first_rank() -> None:
    """Leave it to the first rank to tell what went wrong on all.

    It ends the other ranks once it has spoken. One that is still there after some seconds failed
    alone, and has to speak for itself.
    """
    if not is_first_rank():
        time.sleep(10)


@contextmanager
def left_as_found() -> Iterator[None]:
    """Undo what a run does to its process, so that the next one starts as the first did."""
    import torch

    from lit_align.matmul import choose_matmul, matmul_in_use

    before = {name: os.environ.get(name) for name in RANK_VARIABLES}
    threads, matmul = torch.get_num_threads(), matmul_in_use()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        choose_matmul(matmul)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _reset_torch()


def _reset_torch() -> None:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.use_deterministic_algorithms(False)  # noqa: FBT003, torch's signature
    torch.backends.cudnn.benchmark = False
    # Trainer, module and loops refer to each other; their tensors go only when the cycle does.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
