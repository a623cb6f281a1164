"""The longest cached prefix that all kinds of caches can go on from. Knows no JAX."""

from collections.abc import Callable, Sequence
import math

from jaxrunner.caches.cache_group import CacheGroup


def find_prefix(
    groups: Sequence[CacheGroup], lookups: Sequence[Callable[[int], bool]], limit: int
) -> int:
    """Returns the longest prefix, in tokens, that every group can go on from.

    lookups: `is_cached` of each group. The result is a multiple of every block size.
    """
    step = math.lcm(*(group.block_size for group in groups))
    hit = limit // step * step
    while True:
        shortest = hit
        for group, is_cached in zip(groups, lookups, strict=True):
            shortest = group.longest_hit(is_cached, shortest) // step * step
        # A group that agreed to a longer prefix may not agree to the shorter one.
        if shortest == hit:
            return hit
        hit = shortest
