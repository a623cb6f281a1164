"""What kernels run of a mixture of experts: the choice of experts, then their MLPs."""

import jax.numpy as jnp

from jaxrunner.experts import Experts, ExpertWeights, Routes
from jaxrunner.kernels_pallas import group_tokens, grouped_mlp, router
from jaxrunner.kernels_pallas.group_tokens import Groups, max_tiles
from jaxrunner.kernels_pallas.grouped_mlp import TILES, TuningConfig
from jaxrunner.operation import Operation
from jaxrunner.ops import grouping
from jaxrunner.ops.routing import Router, RouterConfig
from jaxrunner.types import Array

# Tiles hold twice the tokens of an expert that has its share: few have more, and what a tile has
# too much is read along. Larger ones are for prefills, where two warpgroups compute.
LARGE, CONSUMERS = TILES[-1], 2


def _route(config: RouterConfig, w: Router, logits: Array, real: Array) -> Routes:
    renormalise = config.norm_topk_prob or config.scoring == "softmax_of_chosen"
    return Routes(
        *router.route(
            logits, real, top_k=config.num_experts_per_tok, renormalise=renormalise,
            scale=config.routed_scaling_factor,
        )
    )  # fmt: skip


def _refuses_route(config: RouterConfig, w: Router, logits: Array, real: Array) -> str | None:
    if config.scoring not in ("softmax", "softmax_of_chosen"):
        return f"wants scoring by softmax, got {config.scoring}"
    if w.replayed is not None:
        return "chooses experts, and does not replay them"
    if w.choice_bias is not None or config.n_group > 1:
        return "wants experts chosen by their logits alone, without bias or groups"
    return router.refuses(logits, config.num_experts_per_tok)


def _experts(x: Array, routes: Routes, w: Experts) -> Array:
    (T, k), (tile, config) = routes.experts.shape, _sizes(x, routes, w)
    if group_tokens.refuses(x, routes.experts, w.num_experts) is None:
        groups = group_tokens.group_tokens(x, *routes, w.num_experts, tile=tile)
    else:
        groups = group_many(x, routes, w.num_experts, tile)
    return grouped_mlp.grouped_mlp(groups, w.gate_up, w.down, (T, k), config)


def _refuses_experts(x: Array, routes: Routes, w: ExpertWeights) -> str | None:
    if not isinstance(w, Experts):
        return f"wants weights that are Experts, got {type(w).__name__}"
    if w.gate_up_bias is not None or w.down_bias is not None:
        return "wants experts without bias"
    if w.activation != "swiglu":
        return f"wants SwiGLU, got {w.activation}"
    return grouped_mlp.refuses(x, w.gate_up, w.down, *_sizes(x, routes, w))


def _sizes(x: Array, routes: Routes, w: Experts) -> tuple[int, TuningConfig]:
    """Returns the rows of a tile, and what else the kernel takes."""
    share = 2 * routes.experts.size / w.num_experts
    tile = next((rows for rows in TILES if rows >= share), LARGE)
    # Of many tokens, what each expert gives is as many bytes as the step has to spare.
    large = TuningConfig(consumers=CONSUMERS, dtype=str(x.dtype))
    if tile == LARGE and grouped_mlp.refuses(x, w.gate_up, w.down, tile, large) is None:
        return tile, large
    return tile, TuningConfig()


def group_many(x: Array, routes: Routes, num_experts: int, tile: int) -> Groups:
    """Does what `group_tokens` does, of many tokens: by a sort, in plain JAX."""
    flat, k = routes.experts.reshape(-1), routes.experts.shape[1]
    found, tiles = (
        grouping.group(routes.experts, num_experts),
        max_tiles(flat.size, num_experts, tile),
    )
    used = -(-found.sizes // tile)
    ends = jnp.cumsum(used, dtype=jnp.int32)
    # A row moves by what the tiles before its expert's have empty.
    shift = (ends - used) * tile - (jnp.cumsum(found.sizes, dtype=jnp.int32) - found.sizes)
    moved = found.place + shift[jnp.minimum(flat, num_experts - 1)]
    row = jnp.where(flat < num_experts, moved, tiles * tile)
    index = jnp.arange(flat.size, dtype=jnp.int32)
    route = jnp.zeros(tiles * tile, jnp.int32).at[row].set(index, mode="drop", unique_indices=True)
    cut = grouping.cut_tiles(found.sizes, flat.size, tile)
    rows = group_tokens.scatter_rows(x, row.reshape(-1, k), tiles * tile)
    return Groups(
        rows,
        route,
        routes.weights.reshape(-1)[route],
        cut.expert[:tiles],
        cut.rows[:tiles],
        cut.num[None],
    )


# (config, router, logits [T, X], real [T]) -> Routes
ROUTE = (Operation("route", _route, _refuses_route),)
# (x [T, E], routes, w) -> parts whose sum is what the experts add, [k, T, E]
GROUPED = (Operation("grouped_mlp", _experts, _refuses_experts),)
