"""The least time of a decode step: the bytes that it has to read and write, over a memory's rate.

It is by the data sheet, and of one device: no step was seen to reach it.
"""

from typing import Any

import jax

from jaxrunner.caches.cache_group import cache_groups
from jaxrunner.caches.kv_blocks import KVBlocks
from jaxrunner.caches.state import RecurrentState
from jaxrunner.mixtures.experts import Experts
from jaxrunner.program.program import Program, pool_sizes
from jaxrunner.program.state import abstract_state
from jaxrunner.quantization.mxfp4 import Mxfp4
from jaxrunner.quantization.quantized_experts import QuantizedExperts
from jaxrunner.worker.cache_costs import num_bytes

RATE = 4.8e12  # bytes a second of an H200's memory, nominal
FORMULA = (
    "(weights, read once, but for embeddings that are no output layer; of X experts the "
    "X * (1 - (1 - k / X)**B) that B requests choose where all are as likely; B * keys and values "
    "that layers see at the middle of the run; B * states, read and written) / 4.8 TB/s, nominal"
)
STACKS = Experts, QuantizedExperts, Mxfp4


def floor_ms(program: Program, params: Any, batch: int, length: int) -> float:
    """Returns the milliseconds of a step in which `batch` requests of `length` tokens gain one."""
    each = request_bytes(program, length)
    return (weight_bytes(program.config, params, batch) + batch * each) / RATE * 1e3


def weight_bytes(config: Any, params: Any, batch: int) -> float:
    """Returns the bytes of weights that a step of `batch` tokens reads, on each device."""
    nodes = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, STACKS))
    stacks = [node for node in nodes if isinstance(node, STACKS)]
    whole = num_bytes(params)
    if getattr(params, "head", None) is not None:
        whole -= num_bytes(params.embed)  # a few rows are read
    if not stacks:
        return whole
    share = read_share(config.router.num_experts, config.router.num_experts_per_tok, batch)
    return whole - (1 - share) * num_bytes(stacks)


def read_share(num_experts: int, top_k: int, batch: int) -> float:
    """Returns the share of experts that `batch` tokens choose, all being as likely."""
    return 1 - (1 - top_k / num_experts) ** batch


def request_bytes(program: Program, length: int) -> float:
    """Returns the bytes of caches that a step reads and writes for a request of `length` tokens.

    What it adds for the new token, a thousandth of it or so, does not count.
    """
    config, sizes = program.config, pool_sizes(program.config, program.engine)
    groups, total = cache_groups(config.cache_kinds, sizes), 0.0
    layers = zip(program.layer_groups, config.cache_kinds, abstract_state(program).kv, strict=True)
    for g, kind, cache in layers:
        of_block = num_bytes(cache) / groups[g].num_blocks
        if isinstance(kind, RecurrentState):
            total += 2 * of_block
        elif isinstance(kind, KVBlocks):  # others keep nothing
            seen = length - kind.num_skipped_tokens(length)
            total += of_block / groups[g].block_size * seen
    return total
