"""Learning-rate schedules over one training run: a linear warm-up, then one of three courses.

They are those of transformers, so a rate found with another trainer means the same here. Each
takes the optimizer first and `total_steps` from the module, and is stepped once per optimizer step.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from lit_align.errors import UserError


def constant(optimizer: Optimizer, total_steps: float, *, warmup: float = 0.0) -> LambdaLR:
    """Rises from 0 to the optimizer's learning rate, then keeps it.

    Args:
        optimizer: its learning rate is the highest.
        total_steps: optimizer steps of the whole run; infinite only without a warm-up.
        warmup: share of the steps spent rising, in [0, 1).
    """
    if not warmup:
        return LambdaLR(optimizer, lambda step: 1.0)
    rising, _ = _phases(total_steps, warmup)
    return _schedule(get_constant_schedule_with_warmup, optimizer, rising)


def linear(optimizer: Optimizer, total_steps: float, *, warmup: float = 0.0) -> LambdaLR:
    """Rises from 0 to the optimizer's learning rate, then falls in a line to 0.

    Args:
        optimizer: its learning rate is the highest.
        total_steps: optimizer steps of the whole run; finite.
        warmup: share of the steps spent rising, in [0, 1).
    """
    rising, steps = _phases(total_steps, warmup)
    return _schedule(get_linear_schedule_with_warmup, optimizer, rising, steps)


def cosine(optimizer: Optimizer, total_steps: float, *, warmup: float = 0.0) -> LambdaLR:
    """Rises from 0 to the optimizer's learning rate, then falls along half a cosine to 0.

    Args:
        optimizer: its learning rate is the highest.
        total_steps: optimizer steps of the whole run; finite.
        warmup: share of the steps spent rising, in [0, 1).
    """
    rising, steps = _phases(total_steps, warmup)
    return _schedule(get_cosine_schedule_with_warmup, optimizer, rising, steps)


def _phases(total_steps: float, warmup: float) -> tuple[int, int]:
    """Steps that rise and steps in all, rounded as transformers and TRL round them."""
    if not 0 <= warmup < 1:
        raise UserError(f"scheduler.warmup is a share of the steps, in [0, 1), not {warmup}")
    if not math.isfinite(total_steps):
        raise UserError(
            "this schedule needs to know where training ends: set trainer.max_steps or "
            "trainer.max_epochs, or choose scheduler=constant with scheduler.warmup=0"
        )
    steps = int(total_steps)
    return math.ceil(steps * warmup), steps


def _schedule(make: Callable[..., Any], optimizer: Optimizer, *steps: int) -> LambdaLR:
    schedule: LambdaLR = partial(make, optimizer, *steps)()
    return schedule
