"""One problem of a kernel: what it takes, and what it has to move or to compute."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Case(NamedTuple):
    """One problem of one kernel."""

    kernel: str
    name: str
    make: Callable[[int], tuple[Any, ...]]  # (seed) -> the kernel's arguments
    run: Callable[..., Any]  # the kernel
    amount: float  # of bytes that must move, or of operations
    unit: str  # "TB/s" or "TFLOP/s"
    options: dict[str, Any]  # the other arguments of `run`
