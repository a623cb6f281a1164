"""Blocks of caches in files: those whose contents count, of each data rank its own.

Arrays of ranks lie one behind another in the state, so blocks are read and written rank by rank,
each on its own devices. In a file each rank has as many rows as the one with the most blocks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrunner.caches.cache_group import CacheKind, distinct, layer_groups
from jaxrunner.caches.interleave import WHOLE, interleave_of
from jaxrunner.loading import orbax_io
from jaxrunner.parallel.stages import whole_state, with_cache
from jaxrunner.parallel.whole import copied, merge, merged_spec, whole_program
from jaxrunner.program.program import Program
from jaxrunner.program.state import abstract_state
from jaxrunner.scheduling.block_pool import BlockPool
from jaxrunner.types import Array, LayerCache

Blocks = list[list[int]]  # of a layer, by rank


def filled_blocks(pools: Sequence[BlockPool], kinds: Sequence[CacheKind]) -> list[Blocks]:
    """Returns each layer's blocks whose contents count.

    pools: of the cache groups of a rank, behind those of the rank before it.
    """
    G = len(distinct(kinds))
    of_group = [[pool.filled() for pool in pools[g::G]] for g in range(G)]
    return [of_group[g] for g in layer_groups(kinds)]


def write_blocks(program: Program, i: int, layer: LayerCache, blocks: Blocks, folder: Path) -> None:
    """Writes blocks of the cache of layer i into a folder, as one device has them."""
    index = _index(blocks, 0)
    values = jax.tree.map(lambda x: jax.jit(_take, out_shardings=x.sharding)(x, index), layer)
    orbax_io.write(folder, merge(values, saved_spec(program, i, layer, blocks)), program.mesh)


def read_blocks(program: Program, state: Any, i: int, blocks: Blocks, folder: Path) -> Any:
    """Returns a state with the blocks of layer i that `write_blocks` wrote; consumes the layer."""
    layer = whole_state(program.config, state).kv[i]
    spec, whole = _rows_of(layer, blocks), saved_spec(program, i, layer, blocks)
    saved = orbax_io.read(folder, merged_spec(spec, whole), program.mesh)
    index = _index(blocks, np.iinfo(np.int32).max)

    def put(cache: Array, rows: Array) -> Array:
        return jax.jit(_put, donate_argnums=0, out_shardings=cache.sharding)(cache, index, rows)

    return with_cache(program.config, state, i, jax.tree.map(put, layer, copied(saved, spec)))


def saved_spec(program: Program, i: int, layer: LayerCache, blocks: Blocks) -> Any:
    """Returns what blocks of layer i are like in a file: those of one device, but where devices
    have other tokens each. layer: its cache."""
    if interleave_of(program.config) != WHOLE:
        return _rows_of(layer, blocks)
    return _rows_of(abstract_state(whole_program(program)).kv[i], blocks)


def _rows_of(layer: LayerCache, blocks: Blocks) -> Any:
    """Returns what the rows of a file are like that have these blocks of a cache."""
    num_rows = _index(blocks, 0).size

    def one(cache: Array) -> jax.ShapeDtypeStruct:
        shape = (num_rows, *cache.shape[1:])
        return jax.ShapeDtypeStruct(shape, cache.dtype, sharding=cache.sharding)

    return jax.tree.map(one, layer)


def _index(blocks: Blocks, padding: int) -> np.ndarray:
    """Returns the blocks of each rank, [ranks, blocks], one at least, as orbax wants."""
    index = np.full((len(blocks), max(1, *map(len, blocks))), padding, np.int32)
    for row, of_rank in zip(index, blocks, strict=True):
        row[: len(of_rank)] = of_rank
    return index


def _take(cache: Array, index: Array) -> Array:
    """Returns the rows of a file."""
    of_ranks = cache.reshape(len(index), -1, *cache.shape[1:])
    return jax.vmap(lambda own, at: own[at])(of_ranks, index).reshape(-1, *cache.shape[1:])


def _put(cache: Array, index: Array, rows: Array) -> Array:
    """Returns a cache with the rows of a file; padding is dropped."""
    D, rest = len(index), cache.shape[1:]
    put = jax.vmap(lambda own, at, new: own.at[at].set(new, mode="drop"))
    of_ranks = put(cache.reshape(D, -1, *rest), index, rows.reshape(D, -1, *rest))
    return of_ranks.reshape(cache.shape)
