"""Chooses the implementations of a layer's operations, and says why others do not run."""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.caches.cache_group import CacheGroup
from jaxrunner.caches.interleave import interleave_of
from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.kernels_pallas import reference
from jaxrunner.kernels_pallas.mosaic import TOO_OLD
from jaxrunner.kernels_pallas.products import add_norm
from jaxrunner.kernels_pallas.sampling import sampler
from jaxrunner.kernels_pallas.states.state_chunks import CHUNK
from jaxrunner.linear import Weights
from jaxrunner.model import AttentionSpec, MakeOps, Ops, RopeAndNorm
from jaxrunner.operation import Note, Operation, run_first, unnoted
from jaxrunner.ops import (
    banded_products,
    cpu_attention,
    experts,
    fp8_products,
    paired_products,
    products,
    routing,
    word_products,
)
from jaxrunner.ops.adapters import low_rank
from jaxrunner.ops.attention import (
    ATTENTION,
    BATCH_INVARIANT_ATTENTION,
    ROTATE_WRITE,
    refuses_kernels,
)
from jaxrunner.ops.latent import attention as latent_attention
from jaxrunner.ops.latent import expanded
from jaxrunner.ops.packed_parts import Qkv
from jaxrunner.ops.plain import add_rms_norm, glu, norm_heads, split_heads, summed
from jaxrunner.ops.states import recurrence, short_conv, state_chunks, state_steps
from jaxrunner.parallel.mesh import devices_of
from jaxrunner.program.program import engine_groups
from jaxrunner.types import Array, Batch, LayerCache

CHUNKS_AT_ONCE = 16  # of prompts in layers with states: a GPU has launches to save
PLAIN_CHUNKS = Operation(
    "plain JAX", functools.partial(recurrence.long_rows, at_once=CHUNKS_AT_ONCE)
)
STATES = recurrence.Candidates(
    short=state_steps.SHORT_ROWS, long=(state_chunks.KERNEL, PLAIN_CHUNKS), padding=CHUNK
)


class Choice(NamedTuple):
    """An implementation, by its name in `EngineConfig.attention_backend`, and why it was taken."""

    name: str
    ops: MakeOps
    reason: str
    sample: Callable[..., Any] | None = None  # draws by the usual rules; None for plain JAX


def paged(batch: Batch, *, note: Note = unnoted) -> Ops:
    """Plain JAX over the paged cache of `batch`."""
    attention = reference if cpu_attention.refuses(batch) else cpu_attention
    latent = functools.partial(latent_attention.attend_latent, latent_attention.PLAIN, batch, note)
    states = _states(batch, short_conv.PLAIN, recurrence.PLAIN, note)
    attend = functools.partial(attention.paged_attention, batch)
    return _plain(attend, latent, states, note, batch)


def dense(batch_size: int, *, note: Note = unnoted) -> Ops:
    """Plain JAX without a cache, for training: T is `batch_size` equal sequences."""
    latent = functools.partial(latent_attention.trained, batch_size, note)
    states = dict(
        convolve=functools.partial(short_conv.trained, batch_size),
        recur=functools.partial(recurrence.trained, batch_size),
    )
    return _plain(functools.partial(reference.dense_attention, batch_size), latent, states, note)


def _states(
    batch: Batch, convolve: tuple[Operation, ...], recur: recurrence.Candidates, note: Note
) -> dict[str, Any]:
    """Returns the operations that carry states of requests on."""
    return dict(
        convolve=functools.partial(short_conv.convolve, convolve, batch, note=note),
        recur=functools.partial(recurrence.recur, recur, batch, note=note),
    )


def _plain(
    attention: Callable[..., Any], attend_latent: Callable[..., Any], states: dict[str, Any],
    note: Note, batch: Batch | None = None,
) -> Ops:  # fmt: skip
    def attend(q: Array, k: Array, v: Array, cache: Any, spec: AttentionSpec) -> tuple[Array, Any]:
        return _only("attention", attention, q, k, v, cache, spec)

    def rotate_attend(
        qkv: Array, heads: RopeAndNorm, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        return attend(*split_heads(qkv, heads), cache, spec)

    def linear(x: Array, w: Weights) -> Array:
        return _only("linear", w.product, x)

    def mlp(
        x: Array, gate_up: Weights, down: Weights, activation: str = "silu",
        *, beside_experts: bool = False,
    ) -> Array:  # fmt: skip
        return down.product(glu(_only("mlp", gate_up.product, x), activation))

    if batch is None:  # a trainer's
        run_experts, run_route = functools.partial(experts.trained, note=note), routing.route
    else:
        run_experts = functools.partial(experts.experts, note=note, plain=True)
        run_route = functools.partial(experts.route, batch, note=note, plain=True)

    def add_norm(*args: Any, readers: Sequence[Weights] = ()) -> tuple[Array, Array]:
        return _norm_of_parts(*args)

    def _only(operation: str, run: Callable[..., Any], *args: Any) -> Any:
        return run_first(operation, (Operation("plain JAX", run),), *args, note=note)

    return Ops(
        attend=attend, rotate_attend=rotate_attend, attend_latent=attend_latent, linear=linear,
        project_qkv=linear, project=linear, mlp=mlp, route=run_route, experts=run_experts,
        add_norm=add_norm, norm_heads=norm_heads, batch=batch, **states,
    )  # fmt: skip


def fused(batch: Batch, *, note: Note = unnoted, batch_invariant: bool = False) -> Ops:
    """Kernels over the paged cache of `batch`; plain JAX for the steps that a kernel refuses.

    batch_invariant: whether the bits of a row must not depend on others of a batch.
    """
    attention, latents = ATTENTION, latent_attention.LATENT_ATTENTION
    prompts = expanded.PROMPTS
    if batch_invariant:
        attention = BATCH_INVARIANT_ATTENTION
        latents = latent_attention.BATCH_INVARIANT_LATENT_ATTENTION
        prompts = ()  # whose keys are made where there is room for those of all rows

    def attend(q: Array, k: Array, v: Array, cache: Any, spec: AttentionSpec) -> tuple[Array, Any]:
        cache = reference.write_kv(batch, k, v, cache, spec.group)
        return run_first("attention", attention, batch, q, cache, spec, note=note), cache

    def rotate_attend(
        qkv: Qkv, heads: RopeAndNorm, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        args = batch, qkv, heads, cache, spec.group
        q, cache = run_first("rotate and write", ROTATE_WRITE, *args, note=note)
        return run_first("attention", attention, batch, q, cache, spec, note=note), cache

    def add_norm(*args: Any, readers: Sequence[Weights] = ()) -> tuple[Array, Any]:
        known = *(norm.of(readers) for norm in NORMS_FOR_PRODUCTS if readers), *ADD_NORM
        return run_first("add_norm", known, *args, note=note)

    attend_latent = functools.partial(
        latent_attention.attend_latent, latents, batch, note, prompts=prompts
    )
    return Ops(
        attend=attend,
        rotate_attend=rotate_attend,
        attend_latent=attend_latent,
        linear=functools.partial(products.linear, note=note),
        project_qkv=functools.partial(products.project_qkv, note=note),
        project=functools.partial(products.project, note=note),
        mlp=functools.partial(products.mlp, note=note),
        route=functools.partial(experts.route, batch, note=note),
        experts=functools.partial(experts.experts, note=note),
        norm_heads=norm_heads,
        add_norm=add_norm,
        batch=batch,
        adapters=low_rank.KERNELS,
        **_states(batch, short_conv.KERNELS, STATES, note),
    )


BATCH_INVARIANT = functools.partial(fused, batch_invariant=True)


def _norm_kernel(
    x: Array, residual: Array, weight: Array, eps: float, one_more: bool = False,
    end: Array | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    return add_norm.add_rms_norm(x, residual, weight, end=end, eps=eps, one_more=one_more)


def _refuses_norm(
    x: Array, residual: Array, weight: Array, eps: float, one_more: bool = False,
    end: Array | None = None,
) -> str | None:  # fmt: skip
    return add_norm.refuses(x, residual, weight, end=end)


def _norm_of_parts(x: Array, residual: Array, weight: Array, *how: Any) -> tuple[Array, Array]:
    return add_rms_norm(x, summed(residual, x.dtype), weight, *how)


NORMS_FOR_PRODUCTS = (
    fp8_products.NORM,
    banded_products.NORM,
    paired_products.NORM,
    word_products.NORM,
)
ADD_NORM = (
    Operation("add_rms_norm", _norm_kernel, _refuses_norm),
    Operation("plain JAX", _norm_of_parts),
)


def choose_ops(model: ModelConfig, engine: EngineConfig) -> Choice:
    """Returns what computes the layers of an engine.

    Raises:
      ValueError: `attention_backend` names kernels that this model or device cannot use.
    """
    wanted = engine.attention_backend
    if wanted == "reference":
        return Choice("reference", paged, "it was asked for")
    reason = "is compiled, and enforce_eager compiles nothing" if engine.enforce_eager else None
    reason = reason or _refuses_device(model)
    if wanted == "mosaic_gpu":  # whose attention is to run, too: else that alone is plain JAX
        reason = reason or refuses(model, engine)
    if reason is None:
        shape = engine.max_num_seqs, model.vocab_size
        logits = jax.ShapeDtypeStruct(shape, jnp.dtype(engine.dtype))
        sample = sampler.sample_tokens if sampler.refuses(logits, sampler.DEFAULT) is None else None
        ops = BATCH_INVARIANT if engine.batch_invariant else fused
        return Choice("mosaic_gpu", ops, "it serves this model on this device", sample)
    if wanted == "mosaic_gpu":
        raise ValueError(f"attention_backend='mosaic_gpu' {reason}: use 'auto' or 'reference'")
    return Choice("reference", paged, f"mosaic_gpu {reason}")


def refuses(model: ModelConfig, engine: EngineConfig) -> str | None:
    """Says why kernels do not attend to what this model keeps; None if they do."""
    groups = engine_groups(model, engine)
    return next(filter(None, map(functools.partial(_refuses_group, model, engine), groups)), None)


def _refuses_device(model: ModelConfig) -> str | None:
    device = devices_of(model)[0]
    if getattr(device, "compute_capability", None) != "9.0":
        return f"wants a Hopper GPU (compute capability 9.0), got {device.device_kind}"
    return TOO_OLD  # which not all kernels check


def _refuses_group(model: ModelConfig, engine: EngineConfig, group: CacheGroup) -> str | None:
    """Says why kernels do not attend to what a cache group keeps; None if they do."""
    if group.kind.leaves is not LayerCache:
        return None  # `ops.latent.attention`, or the model's own layers, read it
    H, K, D = ((model.dims | group.kind.dims)[axis] for axis in "HKD")
    q = jax.ShapeDtypeStruct((1, H, D), jnp.dtype(engine.dtype))
    shape = group.num_blocks, K, group.block_size // interleave_of(model).parts, D
    kv = jax.ShapeDtypeStruct(shape, jnp.dtype(engine.kv_dtype))
    return refuses_kernels(q, kv)
