"""Memory of the CPU that the C library keeps when tensors are freed."""

import ctypes
from typing import Any

_LIBRARY: Any = ctypes.CDLL(None)


def give_back() -> None:
    """Return to the system what is free; nothing where the C library cannot do that.

    What a model frees between the tensors that it keeps for the backward pass are holes, and what
    comes next does not fit into them. They are a good fifth of what a forward pass takes.
    """
    trim = getattr(_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)
