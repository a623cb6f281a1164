"""The properties that an engine has in common with the one that goes on in its place."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import jax

from jaxrunner.caches.interleave import WHOLE, interleave_of
from jaxrunner.parallel.pipeline import StageConfig
from jaxrunner.parallel.tensor import ShardedConfig
from jaxrunner.parallel.whole import sums_of, whole_params, whole_program
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.version import __version__
from jaxrunner.worker.expert_balance import in_order

MOST_NAMED = 3  # differences in one message


def likeness(runner: ModelRunner) -> dict[str, str]:
    """Returns properties that two runners must share, by name: of weights a sum of their bits."""
    config, program = runner.program.config, whole_program(runner.program)  # any mesh can go on
    model = config.family if isinstance(config, ShardedConfig | StageConfig) else program.model
    functions = dict(layers=model.layers, logits=model.logits)
    tables = [(table.name, table.extra_args) for table in program.tables]
    told = dict(jaxrunner=__version__, tables=repr(tables))
    told |= {name: f"{f.__module__}.{f.__qualname__}" for name, f in functions.items()}
    told |= runner.adapters.describe() if runner.adapters else {}
    configs: tuple[Any, Any] = program.config, program.engine
    for of in configs:  # functions, which no other process has at one place, are no `repr`
        told |= {f.name: repr(getattr(of, f.name)) for f in fields(of) if f.repr}
    told |= dict(max_num_seqs=repr(runner.program.dims["R"]))  # of all stages, however many
    pools = [(pool.layers, pool.block_size) for pool in runner.program.cache_groups]
    told |= dict(cache_groups=repr(pools))
    if (interleave := interleave_of(config)) != WHOLE:
        told |= dict(interleave=f"{interleave} on {runner.program.mesh}")
    params = in_order(runner)
    whole = dict(jax.tree.leaves_with_path(whole_params(program.model.params, program.config)))
    of_devices = dict[frozenset[Any], list[Any]]()  # each stage of a pipeline has some weights
    for leaf in jax.tree.leaves_with_path(params):
        of_devices.setdefault(frozenset(leaf[1].devices()), []).append(leaf)
    for leaves in of_devices.values():
        shapes = tuple(whole[path].shape for path, _ in leaves)
        sums = jax.device_get(sums_of([x for _, x in leaves], shapes))
        for (path, x), shape, total in zip(leaves, shapes, sums, strict=True):
            name = f"params{jax.tree_util.keystr(path)}"
            told[name] = f"{x.dtype}{list(shape)} of sum {total:#x}"
    return told


def check_alike(folder: Path, saved: dict[str, str], own: dict[str, str]) -> None:
    """Checks that the engine saved in a folder was like the one that is to go on.

    Raises:
      ValueError: it was not; names up to three differences.
    """
    if names := sorted(name for name in saved | own if saved.get(name) != own.get(name)):
        pairs = [f"{n}={saved.get(n)}, not {own.get(n)}" for n in names[:MOST_NAMED]]
        raise ValueError(
            f"the engine saved in {folder} differs from this one in {len(names)} things, it had "
            f"{'; '.join(pairs)}: build this one like it"
        )
