"""The static half of an engine: what is compiled in."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.caches.cache_group import CacheGroup, PoolSizes, cache_groups, layer_groups
from jaxrunner.caches.interleave import interleave_of, token_dims
from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.lora.product import Product
from jaxrunner.lora.saved_layers import LayerWeight
from jaxrunner.lora.saved_modules import embed_tokens, score_rows, weights_of
from jaxrunner.model import MakeOps, Model
from jaxrunner.parallel.mesh import TENSOR, mesh_of, num_ranks
from jaxrunner.parallel.stages import held_caches, is_spread, num_slots, num_stages, stages_of
from jaxrunner.program.bucket import MAX_STOP_IDS, WIDE
from jaxrunner.rule import Rule
from jaxrunner.slot_table import SlotTable
from jaxrunner.types import Array, Inputs

# Fields of `EngineConfig` that choose programs and when they run, and are not compiled in.
HOST_ONLY = (
    "token_buckets", "decode_buckets", "num_decode_steps", "async_depth", "policy",
    "enable_prefix_caching", "long_prefill_token_threshold", "seed", "max_cpu_loras",
    "step_timeout_s",
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """The static arguments of all programs of an engine."""

    model: Model
    config: ModelConfig
    engine: EngineConfig
    ops: MakeOps  # makes the operations of layers for a batch
    rules: tuple[Rule, ...] = ()
    num_drafts: int = 0  # K of a step, at most
    sample: Callable[..., Any] | None = None  # kernel for rules of every draw; None for plain JAX
    lora: tuple[Product, ...] = ()  # products that adapters may change
    saved: tuple[tuple[str, str], ...] = ()  # fields that adapters may replace, and their modules
    saved_layers: tuple[LayerWeight, ...] = ()  # layers behind a pooling that they may replace
    peer_rows: int = 0  # tokens of a step, at most, whose rows devices write to each other

    @property
    def extra_args(self) -> list[str]:
        """The names that slot tables read in `SamplingParams.extra_args`."""
        return [name for table in self.tables for name in table.extra_args]

    @functools.cached_property
    def traced(self) -> "Program":
        """The program that is traced: `HOST_ONLY` fields have their defaults.

        So engines that differ only in these share executables.
        """
        default = {f.name: f.default for f in fields(EngineConfig) if f.name in HOST_ONLY}
        return replace(self, engine=replace(self.engine, **default))

    @functools.cached_property
    def tables(self) -> list[SlotTable]:
        """The slot tables of the state: of rules, the model, its speculator and its heads."""
        speculator = self.model.speculator
        drafts = () if speculator is None else speculator.tables
        kept = (head.table for head in self.model.heads if head.table is not None)
        return [*(rule.table for rule in self.rules), *self.model.tables, *drafts, *kept]

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The mesh that it runs on; None for one device."""
        return mesh_of(self.config)

    @property
    def peers(self) -> jax.sharding.Mesh | None:
        """The mesh whose devices write into each other's memory; None where none do."""
        return self.mesh if self.peer_rows else None

    @property
    def num_ranks(self) -> int:
        """Data ranks, each with slots and KV blocks of the engine's sizes; 1 without data ranks.

        Sizes of a program are those of one rank; arrays of all ranks are joined along an axis.
        """
        return num_ranks(self.mesh)

    @property
    def is_shared(self) -> bool:
        """Whether several processes run it, each on its own devices or stages."""
        return is_spread(self.config) or (self.mesh is not None and self.mesh.is_multi_process)

    @property
    def num_shares(self) -> int:
        """Devices of which each has the logits of its own tokens, and samples its own rows."""
        if (mesh := self.mesh) is None or self.model.own_logits is None:
            return 1
        return mesh.shape[TENSOR]

    def embed(self, params: Any, inputs: Inputs) -> Array:
        """Returns embedded tokens, [T, E]."""
        return embed_tokens(self.model, self.config, params, inputs)

    def logits(self, params: Any, hidden: Array, place: Array | None = None) -> Array:
        """Returns logits, [..., V] or a device's part of V, of hidden, [..., E].

        place: [...], places of the rows' adapters, where `params` hold heads of adapters.
        """
        model = self.model
        of = model.logits if self.num_shares == 1 else model.own_logits
        assert of is not None
        if place is None:
            return of(self.config, weights_of(params), hidden)
        scored = functools.partial(of, self.config)
        return score_rows(scored, params, hidden, place, whole=self.mesh is None)

    @functools.cached_property
    def stages(self) -> tuple["Program", ...]:
        """The programs of a pipeline's stages in this process; () without a pipeline."""
        return tuple(replace(self, config=config) for config in stages_of(self.config))

    @functools.cached_property  # asked for in every step
    def num_launches(self) -> int:
        """The most launches in flight: `async_depth` for each stage."""
        return self.engine.async_depth * num_stages(self.config)

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """The cache group of each layer whose caches the state has."""
        groups = layer_groups(self.config.cache_kinds)
        return tuple(groups[i] for i in held_caches(self.config))

    @functools.cached_property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The layers that share block tables, and their pools."""
        return engine_groups(self.config, self.engine)

    @functools.cached_property
    def dims(self) -> dict[str, Any]:
        """Axis sizes, dtypes and flags, for `pytree`."""
        e = self.engine
        return self.config.dims | dict(
            R=num_slots(self.config, e), L=e.max_model_len, X=MAX_STOP_IDS, key=2,
            **WIDE, kv=jnp.dtype(e.kv_dtype), scaled=e.scaled, param=jnp.dtype(e.dtype),
            G=tuple(self.group_dims(group) for group in self.cache_groups),
        )  # fmt: skip

    def group_dims(self, group: CacheGroup) -> dict[str, Any]:
        """Sizes of the axes of a cache group; S is the tokens that a device has of a block."""
        N, L = group.num_blocks, self.engine.max_model_len
        sizes = group.kind.dims | token_dims(self.config, group.block_size)
        drafted = dict(drafted=self.num_drafts, drafts=self.num_drafts > 0)
        return sizes | drafted | dict(N=N, M=group.table_len(L), J=1 + self.num_drafts)


@functools.lru_cache(maxsize=64)  # asked for in every step
def engine_groups(config: ModelConfig, engine: EngineConfig) -> tuple[CacheGroup, ...]:
    """Returns the cache groups of an engine."""
    return cache_groups(config.cache_kinds, pool_sizes(config, engine))


def pool_sizes(config: ModelConfig, engine: EngineConfig) -> PoolSizes:
    """Returns the sizes of block pools. A block has `block_size` tokens on each device of a group
    that shares out tokens."""
    e, parts, R = engine, interleave_of(config).parts, num_slots(config, engine)
    tokens = e.max_model_len, R, e.max_num_batched_tokens
    return PoolSizes(
        e.block_size * parts, e.num_blocks, *tokens, mamba_block_size=e.mamba_block_size or 0,
        num_checkpoints=e.num_state_checkpoints or R,
    )  # fmt: skip
