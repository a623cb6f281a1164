"""The arrays of all adapters on the device, by the paths of the products that they belong to."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrunner import pytree
from jaxrunner.linear import Linear
from jaxrunner.lora.adapted_linear import AdaptedLinear, Stack
from jaxrunner.lora.product import Product
from jaxrunner.lora.saved_modules import EMBED, HEAD, AdaptedParams, SavedModule
from jaxrunner.parallel.mesh import mesh_axis, shardings
from jaxrunner.parallel.stages import is_last, own_part, rank_of
from jaxrunner.program.program import Program
from jaxrunner.pytree import name_of

# Before paths in the params of a model with a drafter, and of one that pools: `pytree.part`.
TARGET, BASE = "target.", "base."
SAVED = "saved "  # before fields that adapters have instead
Stacks = dict[str, Any]  # of `Stack`, by path, and of `SavedModule`


@functools.lru_cache(maxsize=64)  # every program with adapters asks for it, of each stage
def abstract_stacks(program: Program) -> Stacks:
    """Returns the shapes and dtypes of the stacks, and on a mesh where each array lies.

    Of a stage of a pipeline these are those of its layers.
    """
    paths = {product.path: product for product in program.lora}
    products = {path.removeprefix(TARGET).removeprefix(BASE): of for path, of in paths.items()}
    kind = functools.partial(_stand_in, products, program.engine.max_lora_rank)
    kinds = program.dims.get("kinds", {}) | {Linear: kind}
    dims = program.dims | dict(kinds=kinds, lora_places=program.engine.max_loras)
    tree = own_part(program.config, pytree.abstract(program.model.params, dims))
    stacks = _by_path(tree) | _of_heads(program, tree) | _saved(program)
    if program.mesh is None:
        return stacks
    tree = own_part(program.config, shardings(program.model.params, dims, program.mesh))
    heads = {path: _at_of_heads(at) for path, at in per_head(tree).items()}
    where = _by_path(tree) | heads | _saved_at(program)
    return jax.tree.map(lambda x, at: x.update(sharding=at), stacks, where)


def per_head(tree: Any) -> Stacks:
    """Returns the weights of each head in a tree like the params, or what stands for them."""
    nodes = jax.tree.leaves_with_path(tree, is_leaf=lambda node: hasattr(node, "per_head"))
    return {
        f"{name_of(path)}.{field}": weight
        for path, node in nodes
        for field in getattr(node, "per_head", ())
        if (weight := getattr(node, field)) is not None
    }


def _of_heads(program: Program, tree: Any) -> Stacks:
    """Returns the stacks of weights of each head, [outputs, H, inputs]."""
    known, made = {product.path for product in program.lora}, {}
    sizes = 1, program.engine.max_loras, program.engine.max_lora_rank
    for path, weight in per_head(tree).items():
        if path in known:
            *outputs, inputs = weight.shape
            a, b = (*sizes, inputs), (*sizes, *outputs)
            a, b = (jax.ShapeDtypeStruct(shape, program.dims["param"]) for shape in (a, b))
            made[path] = pytree.host_value(Stack, a=a, b=b)
    return made


def _at_of_heads(at: NamedSharding) -> Stack:
    *outputs, inputs = at.spec
    a, b = PartitionSpec(None, None, None, inputs), PartitionSpec(None, None, None, *outputs)
    a, b = (NamedSharding(at.mesh, spec) for spec in (a, b))
    return pytree.host_value(Stack, a=a, b=b)


def _saved(program: Program) -> Stacks:
    """Returns the shapes and dtypes of what adapters have in place of other weights."""
    shape = program.dims["V"], program.dims["E"]
    shapes = dict.fromkeys(_saved_fields(program), shape)
    shapes |= {of.path: of.shape for of in program.saved_layers}
    return {SAVED + field: _saved_module(program, shape) for field, shape in shapes.items()}


def _saved_module(program: Program, shape: tuple[int, ...]) -> SavedModule:
    num, table = program.engine.max_loras, jax.ShapeDtypeStruct(shape, program.dims["param"])
    has = jax.ShapeDtypeStruct((num,), jnp.bool)
    return pytree.host_value(SavedModule, tables=(table,) * num, has=has)


def _saved_fields(program: Program) -> list[str]:
    """Returns the fields of `Program.saved` that a stage reads: the first one or the last."""
    reads = {EMBED: rank_of(program.config) == 0, HEAD: is_last(program.config)}
    return [field for field, _ in program.saved if reads[field]]


def _saved_at(program: Program) -> Stacks:
    """Returns where on a mesh each array of `_saved` lies: as the model's embedding and head."""
    assert program.mesh is not None
    num, at = program.engine.max_loras, NamedSharding(program.mesh, PartitionSpec())
    axis = mesh_axis("V", program.dims)
    table = NamedSharding(program.mesh, PartitionSpec(axis, mesh_axis("E", program.dims)))
    of = pytree.host_value(SavedModule, tables=(table,) * num, has=at)
    return {SAVED + field: of for field in _saved_fields(program)}


def make_stacks(program: Program) -> Stacks:
    """Returns the stacks of no adapter."""
    spec = abstract_stacks(program)

    def make() -> Stacks:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec)

    if program.mesh is None:
        return make()
    return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, spec))()


def merged(params: Any, stacks: Stacks) -> Any:
    """Returns weights, or what stands for them, with those that have a stack beside it."""

    def one(path: Any, node: Any) -> Any:
        stack = stacks.get(name_of(path))
        return node if stack is None else AdaptedLinear(node, stack)

    adapted = jax.tree.map_with_path(one, params, is_leaf=is_weights)
    saved = {name.removeprefix(SAVED): of for name, of in stacks.items() if name.startswith(SAVED)}
    return AdaptedParams(adapted, saved) if saved else adapted


def is_weights(node: Any) -> bool:
    """Whether a node of the params holds the weights of a product."""
    return hasattr(node, "product")


def _stand_in(
    products: dict[str, Product], rank: int, path: str, given: Any, dims: Any
) -> tuple[type, Any, Any]:
    """Returns what is built in the place of `Linear` at a path, as `pytree.build` asks."""
    if (product := products.get(path)) is None:
        return Linear, given, dims
    outputs, blocks = given["outputs"].split(), product.blocks
    rest = " ".join(outputs if blocks == 1 else outputs[1:])
    sizes = dict(lora_blocks=blocks, lora_rank=rank * len(product.modules) // blocks)
    return Stack, {**given, "block_outputs": rest}, {**dims, **sizes}


def _by_path(tree: Any) -> Stacks:
    nodes = jax.tree.leaves_with_path(tree, is_leaf=lambda node: isinstance(node, Stack))
    stacks = {name_of(path): node for path, node in nodes if isinstance(node, Stack)}
    return {path: stack for path, stack in stacks.items() if jax.tree.leaves(stack)}
