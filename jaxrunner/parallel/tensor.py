"""Tensor parallelism: wraps a model so that its functions run on the shards of a mesh.

Megatron-LM's cut (arXiv:1909.08053): each device has some heads, MLP units and tokens of the
vocabulary; what attention and MLP add to the residual is summed over the devices. Of a mixture each
has units of every expert or, under expert parallelism (arXiv:2006.16668), some whole experts.
"""

from dataclasses import dataclass, field, replace
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrunner.caches.interleave import WHOLE, Interleave
from jaxrunner.config import ModelConfig, WrappingConfig
from jaxrunner.kernels_pallas.products.peer_rows import Peers
from jaxrunner.linear import Weights
from jaxrunner.mixtures.experts import ExpertWeights, Routes
from jaxrunner.model import MakeOps, Model, Ops, Stored
from jaxrunner.operation import Note, unnoted
from jaxrunner.ops.plain import summed
from jaxrunner.parallel.context import check_context
from jaxrunner.parallel.custom_all_reduce import add_norm, device_parts
from jaxrunner.parallel.exchange import exchanged, own_parts
from jaxrunner.parallel.kv_heads import check_runs, check_sizes, copied_dims, copied_sources
from jaxrunner.parallel.mesh import (
    DATA,
    DEALT_OUT,
    EXPERT_PARALLEL,
    EXPERTS,
    GROUPS,
    SPLIT_MIXERS,
    TENSOR,
    num_ranks,
)
from jaxrunner.parallel.requirements import check_mesh
from jaxrunner.types import Array, Batch, Inputs


@dataclass(frozen=True)
class ShardedConfig(WrappingConfig):
    """The config of a model or drafter on a mesh: each device has at least one KV head."""

    INNER = "whole"
    family: Any = field(repr=False)  # the `Model` or `Drafter`
    whole: Any  # its config for one device
    mesh: Mesh
    interleave: Interleave = WHOLE  # how tokens are dealt out to devices with one KV head
    expert_parallel: bool = False  # whether devices have whole experts, not units of each
    exchange_from: int | None = None  # tokens of a step, from which on these go to their experts

    @functools.cached_property
    def dims(self) -> dict[str, Any]:
        """Sizes of axes over all devices, copies of KV heads counted in; and what is cut."""
        num, dims = self.mesh.shape[TENSOR], self.whole.dims
        flags = {EXPERT_PARALLEL: self.expert_parallel, DEALT_OUT: self.interleave != WHOLE}
        if GROUPS in dims and dims[GROUPS] % num == 0:
            flags[SPLIT_MIXERS] = True
        return copied_dims(dims, num) | flags


def sources(config: ShardedConfig) -> Any:
    """Returns where each weight lies in a checkpoint, copies of KV heads made of one."""
    return sources_on_mesh(config.family, config)


def sources_on_mesh(model: Stored, config: Any) -> Any:
    """Returns the sources of a model for one device, on the mesh of a config, if it has one."""
    if (whole := getattr(config, "whole", None)) is None:
        return model.sources(config)
    return copied_sources(model, whole, config.mesh.shape[TENSOR])


def shard(
    model: Model, config: ModelConfig, mesh: Mesh, interleave: Interleave = WHOLE,
    *, expert_parallel: bool = False, exchange_from: int | None = None,
) -> tuple[Model, ModelConfig]:  # fmt: skip
    """Returns a model whose functions run on each device of a mesh, under `shard_map`.

    expert_parallel: whether devices have whole experts, not units of each.
    exchange_from: tokens of a rank's step, from which on these go to their experts' devices and
        back, where else all come together; None for never.

    Raises:
      ValueError: the model does not run on shards, or a size is no multiple of the devices; says
        which would do. Or the devices are of several kinds.
      RuntimeError: JAX and NCCL cannot sum over the devices.
    """
    if not model.tensor_parallel and mesh.size > 1:
        raise ValueError(
            f"tensor_parallel_size={mesh.shape[TENSOR]} wants a model that runs on shards, "
            f"{config.architecture} does not say so: set Model.tensor_parallel, or leave it out"
        )
    check_mesh(mesh)
    if expert_parallel and num_ranks(mesh) > 1 and config.dims[EXPERTS] % mesh.size:
        raise ValueError(
            f"data_parallel_size={num_ranks(mesh)} with tensor_parallel_size={mesh.shape[TENSOR]} "
            f"and enable_expert_parallel has {mesh.size} devices, which do not divide "
            f"num_experts={config.dims[EXPERTS]}: change one of them"
        )
    check_sizes(config, mesh.shape[TENSOR], expert_parallel=expert_parallel)
    made = ShardedConfig(model, config, mesh, interleave, expert_parallel, exchange_from)
    check_runs(model.params, made.dims, mesh.shape[TENSOR])
    check_context(config, mesh.shape[TENSOR], interleave)
    sharded = model._replace(
        embed=_embed, logits=_logits, layers=_layers, sources=sources, own_logits=_own_logits
    )
    return sharded, cast(ModelConfig, made)


def all_reduce_ops(
    make: MakeOps, batch: Batch, *, expert_parallel: bool = False, data_ranks: bool = False,
    exchange_from: int | None = None, peers: Peers | None = None, note: Note = unnoted,
) -> Ops:  # fmt: skip
    """Makes the operations of a layer on shards: what is added to the residual is summed.

    data_ranks: whether experts are those of several, whose tokens come together for them; but where
        `exchange_from` says, as in `shard`.
    peers: memory for rows of other devices, for sums that `add_norm` makes; None for psums.
    """
    ops, axes = make(batch, note=note), (DATA, TENSOR) if data_ranks else (TENSOR,)
    all_reduce: Any = _all_reduce if peers is None else device_parts

    def project(x: Array, w: Weights) -> Any:
        return all_reduce(ops.project(_own_inputs(x, w), _on_shard(w)), x.dtype)

    def mlp(
        x: Array, gate_up: Weights, down: Weights, activation: str = "silu", **how: bool
    ) -> Any:
        return all_reduce(ops.mlp(x, gate_up, _on_shard(down), activation, **how), x.dtype)

    def experts(x: Array, routes: Routes, w: ExpertWeights) -> Any:
        if not expert_parallel:
            return all_reduce(ops.experts(x, routes, _on_shard(w, "down_bias")), x.dtype)
        if exchange_from is not None and x.shape[0] >= exchange_from:
            run = functools.partial(_run_experts, ops, w)
            return exchanged(run, x, routes, w.num_experts, axes)
        if data_ranks:
            x, routes = jax.tree.map(_of_all_ranks, (x, routes))
        own = _own_routes(routes, w.num_experts, axes)
        residual = own_parts(ops.experts(x, own, w), own, w.num_experts)
        if data_ranks:
            whole = summed(residual, x.dtype)
            residual = jax.lax.psum_scatter(whole, DATA, tiled=True)
        return all_reduce(residual, x.dtype)

    return replace(
        ops, project=project, mlp=mlp, experts=experts, norm_heads=_norm_heads,
        add_norm=functools.partial(add_norm, ops, peers, note),
    )  # fmt: skip


def _run_experts(ops: Ops, w: ExpertWeights, x: Array, routes: Routes) -> Array:
    return ops.experts(x, routes, w)


def _norm_heads(x: Array, weight: Array, eps: float) -> Array:
    """Returns the norm of the heads of all devices taken together, for a device's own.

    x: [T, heads, D]; weight: [all heads, D], without the copies of KV heads.
    """
    (_, own, D), num = x.shape, jax.lax.axis_size(TENSOR)
    first = jax.lax.axis_index(TENSOR) * weight.shape[0] // num
    weight = jax.lax.dynamic_slice_in_dim(weight, first, own)
    x32 = x.astype(jnp.float32)
    total = jax.lax.psum(jnp.sum(x32 * x32, (1, 2), keepdims=True), TENSOR)
    mean = total / (num * own * D)  # of copies, each head having as many: that of the heads
    return (x32 * jax.lax.rsqrt(mean + eps)).astype(x.dtype) * weight[None]


def _of_all_ranks(x: Array) -> Array:
    """Returns rows of tokens, [T, ...], of all data ranks, one rank's behind another's."""
    return jax.lax.all_gather(x, DATA, tiled=True)


def _own_routes(routes: Routes, num: int, axes: tuple[str, ...]) -> Routes:
    """Returns the routes to a device's own experts, `num` of them, by their numbers there."""
    own = routes.experts - jax.lax.axis_index(axes) * num
    here = (own >= 0) & (own < num)
    return Routes(jnp.where(here, own, num), jnp.where(here, routes.weights, 0.0))


@functools.lru_cache(maxsize=64)  # partials are not equal, and so would be no programs of them
def all_reduced(
    make: MakeOps, expert_parallel: bool = False, data_ranks: bool = False,
    exchange_from: int | None = None,
) -> MakeOps:  # fmt: skip
    """Returns `all_reduce_ops` of what makes the operations of one device."""
    return functools.partial(
        all_reduce_ops, make, expert_parallel=expert_parallel, data_ranks=data_ranks,
        exchange_from=exchange_from,
    )  # fmt: skip


def _all_reduce(residual: Array, dtype: Any) -> Array:
    """Sums a residual, [T, E] or parts of it, over the devices; they send it in `dtype`."""
    return jax.lax.psum(summed(residual, dtype), TENSOR)


def _own_inputs(x: Array, w: Any) -> Array:
    """Returns those of x, [T, inputs], that a device has weights for, where it has x whole."""
    size = getattr(w, "num_inputs", None)
    if x.ndim > 2 or size is None or x.shape[1] == size:
        return x
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(TENSOR) * size, size, 1)


def _on_shard(w: Any, name: str = "bias") -> Any:
    """Returns weights of some of the inputs, whose bias one device alone adds."""
    if hasattr(w, "on_shard"):
        w = w.on_shard(TENSOR)
    if (bias := getattr(w, name, None)) is None:
        return w
    return replace(w, **{name: jnp.where(jax.lax.axis_index(TENSOR) == 0, bias, 0)})


def _embed(config: ShardedConfig, params: Any, inputs: Inputs) -> Array:
    """Each token is embedded by the device that has its row."""
    num = config.vocab_size // config.mesh.shape[TENSOR]
    own = inputs.token_ids - jax.lax.axis_index(TENSOR) * num
    here = (own >= 0) & (own < num)
    x = config.family.embed(
        config.whole, params, replace(inputs, token_ids=jnp.where(here, own, 0))
    )
    return jax.lax.psum(jnp.where(here[:, None], x, 0), TENSOR)


def _layers(config: ShardedConfig, *args: Any, **kwargs: Any) -> Any:
    return config.family.layers(config.whole, *args, **kwargs)


def _logits(config: ShardedConfig, params: Any, hidden: Array) -> Array:
    """Returns the whole vocabulary's logits on each device, [..., V]."""
    own = _own_logits(config, params, hidden)
    return jax.lax.all_gather(own, TENSOR, axis=own.ndim - 1, tiled=True)


def _own_logits(config: ShardedConfig, params: Any, hidden: Array) -> Array:
    """Returns the logits of a device's own tokens, [..., V / devices]."""
    return config.family.logits(config.whole, params, hidden)
