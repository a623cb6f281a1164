"""An adapter on the host: matrices of modules, and as they lie beside the model's products."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
import functools
import hashlib
from typing import Any, NamedTuple

import numpy as np

from jaxrunner.lora.product import Product
from jaxrunner.lora.products import Places

MOST_NAMED, MOST_SHOWN = 3, 100  # modules in a message, and characters of each


class LowRank(NamedTuple):
    """The low-rank update that an adapter adds to a module: b a x, the scale in b."""

    a: np.ndarray  # [rank, inputs]
    b: np.ndarray  # [outputs, rank]


@dataclass(frozen=True)
class Adapter:
    """An adapter by its id, as stacks take it: of each product, by path, a and b of all modules.

    a: [modules, rank, *inputs]; b: [modules, rank, *outputs], without the axis of blocks.
    """

    name: str
    lora_id: int
    matrices: Mapping[str, tuple[np.ndarray, np.ndarray]]
    saved: Mapping[str, np.ndarray] = field(default_factory=dict)  # by path in the weights

    @functools.cached_property
    def digest(self) -> str:
        """A text that any other matrices are unlikely to have."""
        sums = hashlib.sha256()
        for path, pair in sorted(self.matrices.items()):
            sums.update(path.encode())
            for part in pair:
                sums.update(np.ascontiguousarray(part).tobytes())
        for name, table in sorted(self.saved.items()):
            sums.update(name.encode())
            sums.update(np.ascontiguousarray(table).tobytes())
        return sums.hexdigest()


def pack(
    products: Sequence[Product],
    places: Mapping[str, Places],
    modules: Mapping[str, LowRank],
    *,
    dtype: Any,
    max_rank: int,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns `Adapter.matrices` of what an adapter adds to modules.

    Raises:
      ValueError: a module that is none of a layer's products, a rank over `max_rank`, another
        shape, or values that are not finite; names it.
    """
    known = {module for product in products for module in product.modules}
    if unknown := sorted(modules.keys() - known):
        named = [name[:MOST_SHOWN] for name in unknown[:MOST_NAMED]]
        raise ValueError(
            f"the adapter changes {named}, which are no products of a layer of this model: it may "
            f"change {sorted(known)[:MOST_NAMED]} and others like them"
        )
    found = {}
    for product in products:
        named = [modules.get(module) for module in product.modules]
        if any(named):
            found[product.path] = _packed(product, places[product.path], named, dtype, max_rank)
    return found


def check_saved(tables: Mapping[str, np.ndarray], shape: tuple[int, int]) -> None:
    """Checks what an adapter has in place of embedding and head, by modules.

    Raises:
      ValueError: one has another shape, or values that are not finite; names it.
    """
    for module, table in tables.items():
        if table.shape != shape:
            raise ValueError(
                f"{module} of the adapter must be {list(shape)} as the model's is, got "
                f"{list(table.shape)}: train it without new tokens"
            )
        if not np.isfinite(table).all():
            raise ValueError(
                f"{module} of the adapter holds values that are NaN or infinite: correct it"
            )


def _packed(
    product: Product, places: Places, named: list[LowRank | None], dtype: Any, max_rank: int
) -> tuple[np.ndarray, np.ndarray]:
    num, rank = len(named), max(len(of.a) for of in named if of is not None)
    outputs = places.module.shape[1 if product.blocks > 1 else 0 :]
    a = np.zeros((num, rank, *places.column.shape), dtype)
    b = np.zeros((num, rank, *outputs), dtype)
    for i, of in enumerate(named):
        if of is None:
            continue
        here = places.module == i
        _check(product.modules[i], of, places.row[here], places.column, max_rank)
        r = len(of.a)
        a[i, :r] = of.a[:, places.column]
        whole = np.zeros((r, *places.module.shape), dtype)
        whole[:, here] = of.b.T[:, places.row[here]]
        b[i, :r] = whole[:, i] if product.blocks > 1 else whole
    return a, b


def _check(module: str, of: LowRank, rows: np.ndarray, columns: np.ndarray, most: int) -> None:
    """Checks the matrices of a module; raises as `pack`."""
    rank, wanted = len(of.a), (int(rows.max()) + 1, columns.size)
    if of.a.shape != (rank, wanted[1]) or of.b.shape != (wanted[0], rank):
        raise ValueError(
            f"lora_A and lora_B of {module} must be [rank, {wanted[1]}] and [{wanted[0]}, rank], "
            f"got {list(of.a.shape)} and {list(of.b.shape)}: take an adapter of this model"
        )
    if rank > most:
        raise ValueError(
            f"{module} has an adapter of rank {rank}, max_lora_rank={most}: raise max_lora_rank"
        )
    for name, part in zip(("lora_A", "lora_B"), of, strict=True):
        if not np.isfinite(part).all():
            raise ValueError(
                f"{name} of {module} holds values that are NaN or infinite: correct the adapter"
            )
