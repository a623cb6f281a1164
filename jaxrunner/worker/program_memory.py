"""The memory of an engine's programs beside their arguments, before they are compiled.

With our kernels that is little, and `estimate` bounds it. Plain JAX takes ten times as much, in
ways that a formula would have to know: there the largest program of each kind is compiled for a few
blocks first, and never run (`measure`; temporaries hardly depend on the number of blocks, which is
what is sought). A first start pays for that with some seconds; the numbers are kept beside the
programs for the next one.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrunner.caches.state import RecurrentState
from jaxrunner.device.buckets import step_buckets
from jaxrunner.device.entry_points import ENTRY_POINTS
from jaxrunner.device.lowering import extra_bytes, output_bytes
from jaxrunner.device.program_spec import abstract, program_keys, program_spec
from jaxrunner.device.stage_entry_points import BEFORE
from jaxrunner.lora.adapted_linear import MOST_RANKS, tile_rows
from jaxrunner.ops.backends import CHUNKS_AT_ONCE
from jaxrunner.ops.grouping import most_tiles
from jaxrunner.ops.latent.expanded import ROOM
from jaxrunner.program.bucket import MAX_TARGETS
from jaxrunner.program.program import Program
from jaxrunner.programs.program_cache import ProgramCache
from jaxrunner.programs.program_table import Key, ProgramTable

NOTE = "memory of the largest programs"


class ProgramMemory(NamedTuple):
    """The memory that programs take, in bytes."""

    name: str = "none"  # of the largest
    program: int = 0  # its temporaries, and its outputs that are not in place
    waiting: int = 0  # outputs of others that may wait to be read meanwhile


def estimate(program: Program) -> ProgramMemory:
    """Returns what no program takes more of, if kernels compute its layers and draw its tokens.

    By what XLA says of Llama-3-8B and Qwen3-0.6B on an H200: a step keeps the gate, the up product
    and what they make of a layer's tokens, here with a quarter more; rules that few requests want
    keep, where they sort, eleven float32 copies of the logits, here thirteen. Mixtures keep as much
    of each of a token's experts, what goes in, and what comes out in float32, twice. Mixers and
    latent attention have no MLP beside them (`mixer`, `latents`). Weights of 8 and 4 bits are
    widened for many tokens, those of one product at a time, by way of float32.
    """
    e, dims = program.engine, program.dims
    T, itemsize = e.max_num_batched_tokens, jnp.dtype(e.dtype).itemsize
    layer = T * itemsize * (3 * dims["F"] + 2 * dims["E"] + dims["H"] * dims["D"]) * 5 // 4
    expert = itemsize * (3 * dims.get("expert_units", 0) + dims["E"]) + 8 * dims["E"]
    layer += T * dims.get("routes", 0) * expert
    kinds = dict.fromkeys(program.config.cache_kinds)
    layer = max([layer, *(mixer(program, k) for k in kinds if isinstance(k, RecurrentState))])
    if "kv_rank" in dims:
        layer = max(layer, latents(program))
    if program.lora:
        # Their addends to gate and up products, and in between a column for each of their ranks.
        layer += T * (2 * itemsize * dims["F"] + 8 * 3 * e.max_loras * e.max_lora_rank)
        if "kv_rank" in dims:  # a column for each rank and head
            layer += T * 8 * dims["H"] * e.max_loras * e.max_lora_rank
        if 3 * e.max_loras * e.max_lora_rank > MOST_RANKS:  # each tile's matrices, copied
            tiles = most_tiles(T, e.max_loras, tile_rows(T, e.max_loras))
            layer += tiles * 3 * e.max_lora_rank * (dims["E"] + dims["F"]) * itemsize
    if getattr(program.config, "schemes", ()):
        layer += 2 * dims["F"] * dims["E"] * (itemsize + 4)
    logits = max(e.max_num_seqs, MAX_TARGETS) * dims["V"] * 4
    # All tokens' logprobs and ids, of outputs and of prompts.
    return ProgramMemory(
        "program by an estimate", max(layer, 13 * logits), 4 * program.num_launches * logits
    )


def mixer(program: Program, kind: RecurrentState) -> int:
    """Returns the bytes that a layer takes which carries states of a kind on.

    By what XLA says of Granite 4 H Tiny, Qwen3.5-9B and a Mamba-2 of 128 heads: of each token what
    its product makes, the convolution of it and, in float32, what matrices follow from, what reads
    them and what comes out. Of the chunks that are computed at once it takes some of the size of
    their matrices.
    """
    itemsize, E = jnp.dtype(program.engine.dtype).itemsize, program.dims["E"]
    token = itemsize * (2 * E + 3 * kind.channels) + 4 * (kind.channels + 2 * kind.inputs)
    chunk = 4 * 4 * math.prod(kind.matrices) if kind.matrices else 0
    return program.engine.max_num_batched_tokens * token + CHUNKS_AT_ONCE * chunk


def latents(program: Program) -> int:
    """Returns the bytes that latent attention of a layer takes.

    By what XLA says of DeepSeek-V2-Lite, of it with 64 and 128 heads, and of GLM-4.7-Flash's heads:
    of each token and head a query, and what there is more of: keys and values of all tokens that
    there is room for, values as wide as keys, and what both are made of; or absorbed queries, and
    latents that come out.
    """
    dims, T = program.dims, program.engine.max_num_batched_tokens
    by_heads = ROOM * (2 * dims["qk_dim"] + dims["kv_dims"])
    most = dims["qk_dim"] + max(by_heads, dims["latent"] + dims["kv_rank"])
    return T * dims["H"] * jnp.dtype(program.engine.dtype).itemsize * most * 5 // 4


def measure(program: Program, params: Any, cache: ProgramCache | None) -> ProgramMemory:
    """Returns what any program of an engine can need; `program` should have few blocks.

    cache: where that is remembered.
    """
    match cache and cache.recall(NOTE):
        case [str(name), int(most), int(waiting)]:
            return ProgramMemory(name, most, waiting)
    shapes = abstract(params)
    programs = ProgramTable(lambda key: program_spec(program, shapes, key))
    buckets = step_buckets(program.engine, program.model.speculator)
    keys = largest(program_keys(program, buckets, all_rules=True))
    programs.warm_up(keys)
    need = add_up({key: programs[key] for key in keys}, program.num_launches)
    if cache is not None:
        cache.remember(NOTE, need)
    return need


def largest(keys: list[Key]) -> list[Key]:
    """Returns the largest program of each kind, of those that can need much."""
    found, entries = dict[str, Key](), ENTRY_POINTS | BEFORE
    for key in keys:
        if not entries[key.name].is_small:
            found[key.name] = max(found.get(key.name, key), key, key=_sizes)
    return list(found.values())


def _sizes(key: Key) -> list[int]:
    """Returns the numbers of a size, from the first on the one that counts most."""
    flat, left = [], [key.size]
    while left:
        value = left.pop(0)
        if isinstance(value, tuple):
            left = [*value, *left]
        elif value is not None:
            flat.append(value)
    return flat


def add_up(executables: dict[Key, Any], num_launches: int) -> ProgramMemory:
    """Returns what the largest of executables needs while the outputs of launches before it wait.

    Each of `num_launches` may be several programs.
    """
    key = max(executables, key=lambda key: extra_bytes(executables[key]))
    outputs = sum(map(output_bytes, executables.values()))
    waiting = num_launches * outputs - output_bytes(executables[key])
    return ProgramMemory(str(key), extra_bytes(executables[key]), waiting)
