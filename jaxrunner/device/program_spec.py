"""The programs that an engine can need, and the `Spec` that each is compiled from."""

from collections.abc import Callable, Sequence
from dataclasses import replace
import functools
import inspect
from typing import Any

import jax

from jaxrunner.device.lowering import Spec
from jaxrunner.device.program_key import Key
from jaxrunner.device.stage_entry_points import entry_points_of
from jaxrunner.kernels_pallas.products.peer_rows import Peers, abstract_places
from jaxrunner.lora.stacks import abstract_stacks, merged
from jaxrunner.parallel.mesh import TENSOR, placed, ranked
from jaxrunner.parallel.shards import on_shards, told_to_all
from jaxrunner.program.bucket import Bucket, MultiStepBucket, SampleSize
from jaxrunner.program.program import Program
from jaxrunner.sampling import RULES
from jaxrunner.types import Array


def abstract(tree: Any) -> Any:
    """Returns a tree of arrays as abstract arrays, with their shardings on a mesh."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        at = getattr(x, "sharding", None)
        at = at if isinstance(at, jax.sharding.NamedSharding) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)

    return jax.tree.map(one, tree)


def program_spec(program: Program, params: Any, key: Key) -> Spec:
    """Returns what a program is compiled from, for warm-up and dispatch alike.

    params: weights, which may be abstract.
    """
    program = program.traced
    entry, static = entry_points_of(program)[key.name], (("program", program), ("size", key.size))
    if getattr(key.size, "lora", False):
        params = merged(params, abstract_stacks(program))
    out, args = entry.output(program), entry.arguments(program, params, key.size)
    function, names = entry.function, [*inspect.signature(entry.function).parameters]
    if program.mesh is not None and program.num_ranks > 1:
        pairs = zip(names, args, strict=False)
        args = tuple(x if name == "params" else ranked(x, program.mesh) for name, x in pairs)
        function, out = told_to_all(function, out), ranked(out, program.mesh)
    if program.mesh is not None:
        args = placed(args, program.mesh)
    if names[0] == "params" and program.peers is not None:
        function = _with_peers(function)
        args = (args[0], abstract_places(program.peers, TENSOR)), *args[1:]
    function = on_shards(function, program.mesh, args, out)
    if names[0] == "params":
        function = _takes_flat(function, jax.tree.structure(args[0]))
        args = flat_params(args[0]), *args[1:]
    return Spec(
        function,
        static,
        args,
        out,
        entry.donated,
        entry.options(program, key.size),
        entry.is_small,
    )


def flat_params(params: Any) -> tuple[Any, ...]:
    """Returns the arrays of weights, in the order of their tree, as programs take them.

    Each launch walks the trees it is given: those of 32 layers would cost it 30 us of the host.
    """
    return tuple(jax.tree.leaves(params))


@functools.lru_cache(maxsize=1024)
def _with_peers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a device function that takes places of `peer_rows.Exchange` beside the weights."""

    @functools.wraps(function)
    def run(params: tuple[Any, Array], *args: Any, program: Program, **static: Any) -> Any:
        own, places = params
        make: Any = program.ops  # `parallel.tensor.all_reduced`
        ops = functools.partial(make, peers=Peers(places[0], program.peer_rows, program.dims["E"]))
        return function(own, *args, program=replace(program, ops=ops), **static)

    return run


@functools.lru_cache(maxsize=1024)  # a function that is new each time would be lowered each time
def _takes_flat(function: Callable[..., Any], treedef: Any) -> Callable[..., Any]:
    """Returns a device function whose first argument, `params`, is flat; `treedef` is its tree."""

    @functools.wraps(function)
    def run(params: tuple[Any, ...], *args: Any, **static: Any) -> Any:
        return function(jax.tree.unflatten(treedef, params), *args, **static)

    return run


def usual_spec(program: Program, params: Any, key: Key) -> Spec:
    """As `program_spec`, with the rules of `RULES`, which cannot be pickled."""
    return program_spec(replace(program, rules=RULES), params, key)


def program_keys(program: Program, buckets: Sequence[Bucket], *, all_rules: bool) -> list[Key]:
    """Returns the programs that an engine can need; `all_rules`: those of rare parameters too."""
    entries = entry_points_of(program).values()
    keys = [Key(entry.name, size) for entry in entries for size in entry.sizes(program, buckets)]
    if not all_rules:
        return keys
    others = [bucket for bucket in buckets if not bucket.short]
    return keys + [
        Key(entry.name, size) for entry in entries for size in entry.rare_sizes(program, others)
    ]


def step_key(bucket: Bucket, num_steps: int) -> Key:
    """Returns the key of a step, or of several steps in a launch, without rare rules."""
    if num_steps == 1:
        return Key("step", bucket)
    sample = SampleSize(bucket.num_rows, num_drafts=bucket.num_drafts)
    return Key("multi_step", MultiStepBucket(num_steps, sample, bucket.lora, bucket.short))
