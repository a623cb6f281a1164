"""The description of one product of a model for adapters."""

from typing import NamedTuple


class Product(NamedTuple):
    """A product that adapters may change, which may compute several modules of a checkpoint."""

    path: str  # in the params
    modules: tuple[str, ...]
    # Modules that lie one behind the other along the first axis of outputs; 1 where outputs of
    # several are mixed, or where there is one.
    blocks: int
