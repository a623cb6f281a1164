"""Rebalances experts over devices, between two steps, by the loads that steps have counted.

A placement is data: copies of experts move to their new places by a gather of rows, a layer after
the other, and no step is compiled anew.
"""

from dataclasses import replace
import functools
import logging
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from jaxrunner.mixtures.balanced import LOADS, PlacedExperts, maps, placed
from jaxrunner.mixtures.placement import Placement, imbalance, in_turn, of_experts, place
from jaxrunner.parallel.placement import put
from jaxrunner.parallel.processes import check_own
from jaxrunner.parallel.stages import whole_state
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.speculators.drafter import Drafted
from jaxrunner.types import Array

logger = logging.getLogger(__name__)


class ExpertBalance:
    """Counts the steps of a runner with `enable_eplb`, and moves its experts; one device's stay."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, config = runner, cast(Any, runner.program.config)
        self.eplb: Any = getattr(config, "eplb", None)
        self._num_steps, self.num_moves = 0, 0  # since a placement, and placements
        if self.eplb is not None:
            mesh = runner.program.mesh
            check_own(mesh, "enable_eplb=True", "leave it out")
            # Of one stage, and of all data ranks.
            self._num_devices = 1 if mesh is None else mesh.size
            self._before: np.ndarray = np.zeros(0, np.uint32)

    def step(self, num_steps: int) -> None:
        """Counts steps that are about to be launched; every `step_interval` rebalances before."""
        if self.eplb is None:
            return
        start = self.eplb.step_interval - self.eplb.window_size
        if self._num_steps <= start < self._num_steps + num_steps:
            self._before = self.loads()
        self._num_steps += num_steps
        if self._num_steps > self.eplb.step_interval:
            self._num_steps = num_steps
            self.rebalance(self.loads() - self._before)
            self._before = self.loads()

    @property
    def counts(self) -> bool:
        """Whether steps count the tokens of each expert."""
        return any(table.name == LOADS for table in self._runner.program.tables)

    def loads(self) -> np.ndarray:
        """Returns the tokens of each expert so far, modulo 2^32: uint32 [layers, X]. Waits.

        Raises:
          ValueError: they are not counted.
        """
        if not self.counts:
            raise ValueError("no loads of experts are counted: set enable_eplb=True")
        program = self._runner.program
        counts = np.asarray(whole_state(program.config, self._runner.state).tables[LOADS].counts)
        of_ranks = counts.reshape(program.num_ranks, -1, counts.shape[1])
        return of_ranks.astype(np.uint32).sum(0, dtype=np.uint32)

    def rebalance(self, loads: np.ndarray) -> None:
        """Moves copies of experts to where they balance loads, [layers, X]."""
        loads, num = loads.astype(np.float64), self._num_devices
        old = placement_of(self._runner)
        new = place(loads, old.expert.shape[1], num)
        if self.eplb.log_balancedness:
            sparse = np.array(cast(Any, self._runner.program.config).sparse)
            was, will = (1 / imbalance(loads, p, num)[sparse].mean() for p in (old, new))
            logger.warning("experts: mean over max of devices' loads %.3f, now %.3f", was, will)
        move(self._runner, new)
        self.num_moves += 1

    def describe(self) -> str:
        """Returns a line of `LLM.report`: loads of devices as they are placed; none without."""
        if not self.counts or self._runner.params is None or self._runner.state is None:
            return ""
        loads = self.loads().astype(np.float64)
        if not loads.any():
            return "experts: no token counted yet\n"
        sparse = np.array(cast(Any, self._runner.program.config).sparse)
        of_expert = (loads.max(1) / np.maximum(loads.mean(1), 1e-9))[sparse]
        line = f"experts: the busiest of a layer has {of_expert.mean():.2f} times the mean load"
        if self.eplb is None:
            return f"{line}, in all {int(loads[sparse].sum(1).max())} routes a layer\n"
        of_device = imbalance(loads, placement_of(self._runner), self._num_devices)[sparse]
        return f"{line}, its device {of_device.mean():.2f}, {self.num_moves} placements\n"


def warm_up(runner: ModelRunner) -> None:
    """Compiles what moves experts, by a move of each shape to where it is."""
    config = cast(Any, runner.program.config)
    if getattr(config, "eplb", None) is None or runner.params is None:
        return
    index = np.arange(config.num_places, dtype=np.int32)
    layers = [layer.experts for layer in _target(runner.params).layers if layer.experts is not None]
    every = [x for experts in layers for x in _leaves(experts).values()]
    for x in {(x.shape, x.dtype, _mesh_of(x)): x for x in every}.values():
        jax.block_until_ready(gather(_mesh_of(x))(x, index))


def in_order(runner: ModelRunner) -> Any:
    """Moves experts back to where they were loaded, if any has moved. Returns the weights."""
    if (places := getattr(runner.program.config, "num_places", None)) and runner.params is not None:
        first = in_turn(*_sizes(runner), places)
        if (placement_of(runner).expert != first.expert).any():
            move(runner, first)
    return runner.params


def placement_of(runner: ModelRunner) -> Placement:
    """Returns where the copies of experts lie now."""
    (Y, X), config = _sizes(runner), cast(Any, runner.program.config)
    expert = in_turn(Y, X, config.num_places).expert.copy()
    for i, layer in enumerate(_target(runner.params).layers):
        if (own := layer.experts) is not None:
            expert[i] = placed(np.asarray(own.moved), np.asarray(own.more), config.num_places)
    return of_experts(expert, X)


def move(runner: ModelRunner, new: Placement) -> None:
    """Moves the copies of experts to other places, a layer after the other."""
    old, config = placement_of(runner), cast(Any, runner.program.config)
    moved, more = maps(new, 1 + config.eplb.num_redundant_experts)
    for i, layer in enumerate(_target(runner.params).layers):
        if layer.experts is None:
            continue
        stays = old.expert[i] == new.expert[i]
        index = np.where(stays, np.arange(stays.size), old.places[i, new.expert[i], 0])
        made = _moved(layer.experts, index.astype(np.int32))
        made = replace(
            made,
            moved=put(moved[i], layer.experts.moved.sharding),
            more=put(more[i], layer.experts.more.sharding),
        )
        runner.params = _with_layer(runner.params, i, replace(layer, experts=made))


def _moved(experts: PlacedExperts, index: np.ndarray) -> PlacedExperts:
    made: dict[str, Array] = {}
    for name, x in _leaves(experts).items():
        # Waits, so that the memory that a layer frees is available for the next.
        made[name] = jax.block_until_ready(gather(_mesh_of(x))(x, index))
    return replace(experts, **made)


def _mesh_of(x: Array) -> Mesh | None:
    """Returns the devices that have an array: those of its layer's stage."""
    return getattr(x.sharding, "mesh", None)


def _leaves(experts: PlacedExperts) -> dict[str, Array]:
    """Returns the weights of copies, by their names."""
    names = "gate_up", "down", "gate_up_bias", "down_bias"
    return {name: x for name in names if (x := getattr(experts, name)) is not None}


def _sizes(runner: ModelRunner) -> tuple[int, int]:
    """Returns the layers and the experts of a runner's model."""
    config: Any = runner.program.config
    return config.num_hidden_layers, config.router.num_experts


def _target(params: Any) -> Any:
    return params.target if isinstance(params, Drafted) else params


def _with_layer(params: Any, i: int, layer: Any) -> Any:
    """Returns weights with another layer i of the model."""
    if isinstance(params, Drafted):
        return replace(params, target=_with_layer(params.target, i, layer))
    return replace(params, layers=(*params.layers[:i], layer, *params.layers[i + 1 :]))


@functools.lru_cache(maxsize=8)
def gather(mesh: Mesh | None) -> Any:
    """Returns what gathers rows of an array, cut by rows over a mesh: (x [P, ...], index [P])."""
    if mesh is None:
        return jax.jit(lambda x, index: x[index])
    rows = PartitionSpec(mesh.axis_names)
    run = functools.partial(_exchange, mesh.size, mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows, check_vma=False
        )
    )


def _exchange(num: int, axes: tuple[str, ...], x: Array, index: Array) -> Array:
    """Gathers rows of all devices, [m, ...] each, one for each device at a time."""
    m = x.shape[0]
    first = jax.lax.axis_index(axes) * m

    def one(i: Array, out: Array) -> Array:
        wanted = index.reshape(num, m)[:, i] - first  # by device
        here = ((wanted >= 0) & (wanted < m)).reshape(num, *[1] * (x.ndim - 1))
        rows = jnp.where(here, x[jnp.clip(wanted, 0, m - 1)], jnp.zeros((), x.dtype))
        return out.at[i].set(jax.lax.psum_scatter(rows, axes))  # one device has it, others zeros

    return jax.lax.fori_loop(0, m, one, jnp.zeros_like(x))
