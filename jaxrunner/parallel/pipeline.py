"""Pipeline parallelism: a model's layers are shared out over stages, each on a mesh of its own.

GPipe's cut (arXiv:1811.06965): the first stage embeds; the last one has the final norm, the head
and sampling. Each stage has the interface of a model, and its `layers` run the stage's layers.
"""

from collections.abc import Callable, Sequence
import dataclasses
from dataclasses import dataclass, field, replace
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrunner import pytree
from jaxrunner.caches.interleave import WHOLE, Interleave
from jaxrunner.config import ModelConfig
from jaxrunner.model import Model, Source
from jaxrunner.parallel.mesh import make_mesh, shardings
from jaxrunner.parallel.stages import is_spread, num_stages, stages_of
from jaxrunner.parallel.tensor import ShardedConfig, shard
from jaxrunner.slot_table import partition
from jaxrunner.types import Inputs


@dataclass(frozen=True)
class StageConfig:
    """The config of one stage of a model in a pipeline."""

    shards: tuple[ShardedConfig, ...] = field(repr=False, hash=False)  # on the mesh of each stage
    rank: int  # this one
    held: range  # the stages that this process runs
    alone: bool = False  # whether the others are no concern of its engine, but of its user

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("shards", "rank", "held"):
            raise AttributeError(name)  # asked while it is unpickled
        return getattr(self.shards[self.rank], name)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, P."""
        return len(self.shards)

    @property
    def is_last_stage(self) -> bool:
        """Whether this is the last stage, which samples."""
        return self.rank == self.num_stages - 1

    @property
    def pipeline_stages(self) -> tuple["StageConfig", ...]:
        """The stages that this process runs."""
        return tuple(replace(self, rank=rank) for rank in self.held)

    @property
    def is_spread(self) -> bool:
        """Whether other processes run the other stages of the same engine."""
        return len(self.held) < self.num_stages and not self.alone

    @property
    def pipeline_layers(self) -> slice:
        """This stage's layers: stages have equally many, or the first ones have one more."""
        Y, P = self.num_hidden_layers, self.num_stages
        return slice(*(-(-rank * Y // P) for rank in (self.rank, self.rank + 1)))

    def reads(self, path: tuple[Any, ...]) -> bool:
        """Whether this stage reads the weight at a path in the tree."""
        layers, embed, logits = _readers(self.family, self.whole)
        if path[0].name in layers:
            held = self.pipeline_layers
            return held.start <= path[1].idx < held.stop
        name = jax.tree_util.keystr(path)
        by_ends = name in embed or name in logits
        mine = (name in embed and self.rank == 0) or (name in logits and self.is_last_stage)
        return mine or not by_ends

    def own(self, tree: Any) -> Any:
        """Returns a tree like the weights with None for weights that this stage does not read."""
        return jax.tree.map_with_path(
            lambda path, x: x if self.reads(path) else None,
            tree,
            is_leaf=lambda x: isinstance(x, Source),
        )

    def held_part(self, tree: Any) -> Any:
        """As `own`, with the weights of all stages of this process."""
        stages = self.pipeline_stages
        return jax.tree.map_with_path(
            lambda path, x: x if any(stage.reads(path) for stage in stages) else None,
            tree,
            is_leaf=lambda x: isinstance(x, Source),
        )

    @property
    def shardings(self) -> Any:
        """The sharding of each weight that this stage reads."""
        dims = self.dims | {"param": "float32"}
        return self.own(shardings(self.family.params, dims, self.mesh))


def deal(
    model: Model,
    config: ModelConfig,
    num: int,
    tensor_parallel_size: int = 1,
    devices: Sequence[Any] | None = None,
    rank: int | None = None,
    *,
    interleave: Interleave = WHOLE,
    **experts: Any,
) -> tuple[Model, ModelConfig]:
    """Cuts a model into `num` stages, stage s on devices s * N to (s + 1) * N.

    Returns the model with the config of the last stage, which refers to the others. If this process
    has too few devices, stages lie on those of all processes that `jax.distributed` has joined:
    each process runs the stages on its own devices, and its config is that of its last stage.

    rank: the only stage that this process runs, on its first devices; None for all stages.
    experts: further arguments of `shard`.

    Raises:
      ValueError: fewer layers than stages, fewer devices, or a model that cannot be cut; names it.
    """
    name, N = f"pipeline_parallel_size={num}", tensor_parallel_size
    if num > config.num_hidden_layers:
        raise ValueError(
            f"{name} wants a layer a stage, {config.architecture} has {config.num_hidden_layers}: "
            "lower it"
        )
    if rank is not None and rank >= num:
        raise ValueError(f"rank={rank} is none of {name}: take 0 to {num - 1}")
    _check_by_layer(model, config, name)
    here = num if rank is None else 1
    if devices is None:
        devices = jax.local_devices()
        if rank is None and num * N > len(devices):
            devices = jax.devices()
    if here * N > len(devices):
        raise ValueError(
            f"{name} with tensor_parallel_size={N} needs {here * N} devices, there are "
            f"{len(devices)} ({devices[0].device_kind}): lower one"
        )
    meshes = [make_mesh(N, devices[N * s : N * (s + 1)]) for s in range(here)] * (num // here)
    sharded = [shard(model, config, mesh, interleave, **experts) for mesh in meshes]
    shards = tuple(cast(ShardedConfig, config) for _, config in sharded)
    held = _held(meshes, name) if rank is None else range(rank, rank + 1)
    stage = StageConfig(shards, held[-1], held, alone=rank is not None)
    spare = model.spare if len(held) == num else ("",)  # others read what is left
    return sharded[0][0]._replace(layers=_layers, spare=spare), cast(ModelConfig, stage)


def _held(meshes: Sequence[Mesh], name: str) -> range:
    """Returns the stages that lie on devices of this process, which are neighbours."""
    owners = [sorted({device.process_index for device in mesh.devices.flat}) for mesh in meshes]
    if any(len(owner) > 1 for owner in owners):
        raise ValueError(
            f"{name} wants each stage on devices of one process, got stages of processes {owners}: "
            "change tensor_parallel_size"
        )
    found = [s for s, (owner,) in enumerate(owners) if owner == jax.process_index()]
    left = {*range(jax.process_count())} - {owner for (owner,) in owners}
    if left and len(found) < len(meshes):
        raise ValueError(
            f"{name} leaves processes {sorted(left)} without a stage: raise it, or start fewer"
        )
    return range(found[0], found[-1] + 1)


def _check_by_layer(model: Model, config: ModelConfig, name: str) -> None:
    # Tables that steps write by layer are returned by the stages that have the layers.
    by_layer = [t for t in partition(model.tables)[1] if "layers" in dict(t.dims)]
    more = len(by_layer) < len(model.tables) or model.heads or not model.tensor_parallel
    if more or not _layer_fields(model, config):
        raise ValueError(
            f"{name} wants a model of layers alone, {config.architecture} reads slot tables or has "
            "heads, weights that are not declared by layer, or no Model.tensor_parallel: leave it "
            "out"
        )


def to_stages(config: Any, params: Any) -> Any:
    """Returns weights as programs take them: in a pipeline a tuple with those of each stage.

    A weight that two stages read is copied to the second. Arrays may be abstract.
    """
    if params is None or not (stages := stages_of(config)):
        return params
    return tuple(jax.tree.map(_put, stage.own(params), stage.shardings) for stage in stages)


def refuse(config: Any, what: str, cure: str) -> None:
    """Refuses a feature that pipelines do not have.

    Raises:
      ValueError: the config is of a pipeline.
    """
    if (num := num_stages(config)) > 1:
        raise ValueError(f"pipeline_parallel_size={num} does not go with {what}: {cure}")


def check_drafts(config: Any, *, by_layers: bool, adaptive: bool) -> None:
    """Checks that a speculator works in a pipeline, where the last stage drafts without layers.

    Raises:
      ValueError: the config is of a pipeline, and the speculator has layers.
    """
    if by_layers or adaptive or len(stages_of(config)) < num_stages(config):
        refuse(
            config, "drafts of layers, of 'auto' numbers, or of some of the stages",
            "take ngram or suffix and a number, in one process, or none",
        )  # fmt: skip


def refuse_spread(config: Any, what: str, cure: str) -> None:
    """Refuses a feature that stages in several processes do not have.

    Raises:
      ValueError: the config is of such a pipeline.
    """
    if is_spread(config):
        raise ValueError(
            f"{what} does not go with a pipeline over {jax.process_count()} processes: {cure}"
        )


def homes(config: Any) -> Any:
    """Returns the sharding of each weight that this process loads, on its first stage."""
    found: dict[tuple[Any, ...], Any] = {}
    for stage in reversed(config.pipeline_stages):
        found |= dict(jax.tree.leaves_with_path(stage.shardings))
    whole = shardings(config.family.params, config.dims | {"param": "float32"}, config.mesh)
    return jax.tree.map_with_path(lambda path, _: found.get(path), whole)


def _put(x: Any, at: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(sharding=at)
    return x if x.sharding == at else jax.device_put(x, at)


def _layers(
    config: StageConfig, *args: Any, extras: tuple[str, ...] = (), **kwargs: Any
) -> Any:  # fmt: skip
    """Runs the layers of a stage. extras: "name.3" is returned by the stage that has layer 3."""
    held = config.pipeline_layers
    here = tuple(f".{i}" for i in range(held.start, held.stop))
    own = tuple(name for name in extras if name.endswith(here))
    kwargs |= dict(extras=own) if extras else {}
    return config.family.layers(config.whole, *args, first=held.start, last=held.stop, **kwargs)


def _layer_fields(model: Model, config: ModelConfig) -> set[str]:
    """Returns the fields of a model's weights that have a part for each layer."""
    cls = config.dims.get("kinds", {}).get(model.params, model.params)
    return {f.name for f in dataclasses.fields(cls) if f.metadata.get("each") == "Y"}


@functools.lru_cache(maxsize=64)  # asked for each weight
def _readers(model: Model, config: ModelConfig) -> tuple[set[str], frozenset[str], frozenset[str]]:
    """Returns the fields that go by layer, and what `embed` and what `logits` read, by names."""
    dims = config.dims | {"param": "float32", "T": 1}
    params, inputs = (pytree.abstract(cls, dims) for cls in (model.params, Inputs))
    hidden = jax.ShapeDtypeStruct((1, dims["E"]), jnp.float32)
    embed = _read_by(functools.partial(model.embed, config), params, inputs)
    logits = _read_by(functools.partial(model.logits, config), params, hidden)
    return _layer_fields(model, config), embed, logits


def _read_by(function: Callable[..., Any], params: Any, *args: Any) -> frozenset[str]:
    """Returns the names of the weights that a function computes with."""
    jaxpr = jax.make_jaxpr(function)(params, *args).jaxpr
    used = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | set(map(id, jaxpr.outvars))
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    return frozenset(
        jax.tree_util.keystr(path)
        for path, var in zip(paths, jaxpr.invars, strict=False)  # later variables are no weights
        if id(var) in used
    )
