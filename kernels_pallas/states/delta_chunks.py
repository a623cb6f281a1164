"""The value updates of a gated delta rule, by chunks: a triangular system each, on Hopper.

Within a chunk, token i moves its value by beta times what all before it left at its key:
(I + A) moved = beta (value - exp(total) key S), A below the diagonal, A[i, j] = beta[i]
exp(total[i] - total[j]) key[i] key[j]'. arXiv:2406.06484, section 3, with decays as in
arXiv:2412.06464. A thread solves for a column in float32, eight rows at a time.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Ref
from jaxrunner.kernels_pallas.states.halves import halves, pair, product
from jaxrunner.kernels_pallas.states.state_chunks import (
    CHUNK,
    COMPILER,
    LAYOUT,
    PER_ROW,
    decays,
    since,
    tokens_of,
)
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array

COLUMNS = 128  # that a warpgroup solves for: threads
STEP = 8  # rows that a thread has in registers
VECTOR = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=1)


class Chunks(NamedTuple):
    """Tokens that are computed at once."""

    first: Array  # [C], int32
    num: Array  # [C], int32, up to 64; 0 for no chunk


def refuses(value: Any, key: Any, total: Any, beta: Any) -> str | None:
    """Returns why these shapes and dtypes are not served, None if they are."""
    if TOO_OLD is not None:
        return TOO_OLD
    (T, H, X), (_, G, Y), C = value.shape, key.shape, total.shape[0]
    if X != COLUMNS or Y != COLUMNS:
        return f"wants keys and values of {COLUMNS} numbers, got {Y} and {X}"
    chunks = C, H, CHUNK
    shapes = dict(value=(T, H, X), key=(T, G, Y), total=chunks, beta=chunks)
    for (name, shape), x in zip(shapes.items(), (value, key, total, beta), strict=True):
        if x.shape != shape or x.dtype != jnp.float32:
            return f"wants {name} in float32, {list(shape)}, got {x}"
    if not G or H % G:
        return f"wants heads that are a multiple of the groups, got {H} for {G}"
    return None


def delta_chunks(
    chunks: Chunks, value: Array, key: Array, total: Array, beta: Array, *, interpret: Any = None
) -> tuple[Array, Array]:
    """Solves for what tokens move: the first result, plus the second times the S before the chunk.

    value: [T + 64, H, 128]; key: [T + 64, G, 128], of the last 64 tokens anything. total, sums of
    decays as in `state_chunks.Tokens`, and beta: [C, H, 64], by chunk. All are float32. Returns two
    arrays, [T + 64, H, 128], in which tokens of no chunk have anything.

    Raises:
      ValueError: what `refuses` says.
    """
    if why := refuses(value, key, total, beta):
        raise ValueError(f"delta_chunks {why}")
    tiled = mosaic.tiled(64, 2)
    shape = jax.ShapeDtypeStruct(value.shape, jnp.float32)
    return plgpu.kernel(
        _kernel,
        out_type=(shape, shape),
        scratch_types=dict(
            either=plgpu.RefUnion(  # keys, which are read by then, and results
                plgpu.SMEM((2, CHUNK, COLUMNS), jnp.bfloat16, transforms=tiled),
                plgpu.SMEM((CHUNK, COLUMNS), jnp.float32),
            ),
            lower=plgpu.SMEM((CHUNK, CHUNK), jnp.float32),
            scales=plgpu.SMEM((2, CHUNK), jnp.float32),
        ),
        grid=(chunks.num.shape[0], value.shape[1]),
        grid_names=("chunk", "head"),
        kernel_name="delta_chunks",
        compiler_params=replace(COMPILER, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*chunks, value, key, total, beta)


def _kernel(
    first_ref: Ref, num_ref: Ref, value: Ref, key: Ref, total: Ref, beta: Ref, moved: Ref,
    moving: Ref, *, either: Any, lower: Ref, scales: Ref,
) -> None:  # fmt: skip
    c, head = lax.axis_index("chunk"), lax.axis_index("head")
    first, num = first_ref[c], num_ref[c]
    group = lax.div(head, value.shape[1] // key.shape[1])

    @pl.when(num > 0)
    def _() -> None:
        here = pl.ds(first, CHUNK)
        keys = halves(tokens_of(key.at[here, group], num))
        key_smem, solved = either
        held = pair(key_smem)
        for half, ref in zip(keys, held, strict=True):
            ref[...] = half
        gives = mosaic.load(beta.at[c, head], layout=PER_ROW, optimized=False)
        put(scales.at[0], gives)
        put(scales.at[1], -gives * decays(total.at[c, head]).grown)
        plgpu.commit_smem()
        products = product(keys, held.T)
        i, j = (
            plgpu.broadcasted_iota(jnp.int32, products.shape, dim, layout=LAYOUT) for dim in (0, 1)
        )
        weights = lax.broadcast_in_dim(gives, products.shape, [0]) * since(total.at[c, head])
        put(lower, jnp.where((j < i) & (i < num), products * weights, 0.0))
        plgpu.commit_smem()
        for k, (given, at, result) in enumerate(((value, head, moved), (key, group, moving))):
            _solve(given, at, scales.at[k], lower, solved, result.at[:, head], first, num)


def _solve(
    given: Ref, at: Array, scale: Ref, lower: Ref, solved: Ref, result: Ref, first: Array,
    num: Array,
) -> None:  # fmt: skip
    """Solves (I + lower) x = scale given for a chunk, and writes its tokens of x to result, [T, n].

    solved: [C, n], x in shared memory; each thread reads what it wrote alone.
    """

    def load(ref: Ref) -> Array:
        return mosaic.load(ref, layout=VECTOR, optimized=False)

    def rows(b: Array, carried: None) -> None:
        row = b * STEP
        x = [scale[row + i] * load(given.at[first + row + i, at]) for i in range(STEP)]

        def less(before: Array, x: list[Array]) -> list[Array]:
            others = [load(solved.at[before * STEP + j]) for j in range(STEP)]
            for i in range(STEP):
                for j, other in enumerate(others):
                    x[i] = x[i] - lower[row + i, before * STEP + j] * other
            return x

        x = lax.fori_loop(0, b, less, x)
        for i in range(STEP):
            for j in range(i):
                x[i] = x[i] - lower[row + i, row + j] * x[j]
            put(solved.at[row + i], x[i])
            pl.when(row + i < num)(lambda i=i: put(result.at[first + row + i], x[i]))

    lax.fori_loop(0, lax.div(num + STEP - 1, STEP), rows, None)
