"""How the tokens of a KV block are dealt out to devices, for context parallelism, as vLLM does."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrunner.types import Array


class Interleave(NamedTuple):
    """`size` tokens in turn go to each of `parts` devices; a block holds S tokens of each."""

    parts: int = 1
    size: int = 1


WHOLE = Interleave()  # one device has all tokens


def interleave_of(config: Any) -> Interleave:
    """Returns how the devices of a `ModelConfig` share out tokens; by default one has all."""
    return getattr(config, "interleave", WHOLE)


def token_dims(config: Any, block_size: int) -> dict[str, int]:
    """Returns the sizes of axes of a block of so many tokens: S, those of one device;
    "block_tokens", those of all devices of a mesh where tokens are dealt out; "whole_block"."""
    parts = interleave_of(config).parts
    S = block_size // parts
    of_all = S if parts == 1 else S * config.mesh.size
    return dict(S=S, block_tokens=of_all, whole_block=block_size)


class Part(NamedTuple):
    """The tokens of one device, `rank`, of those that a request's tokens are dealt out to.

    Its j-th token has the local position j. Positions and lengths are arrays.
    """

    parts: int
    size: int
    rank: Array | int

    def num_local(self, length: Array) -> Array:
        """Returns how many of the first `length` tokens it has."""
        turn = self.parts * self.size
        rest = jnp.clip(length % turn - self.rank * self.size, 0, self.size)
        return length // turn * self.size + rest

    def position(self, local: Array) -> Array:
        """Returns the positions in the request of its tokens, given local ones."""
        turns, rest = local // self.size, local % self.size
        return (turns * self.parts + self.rank) * self.size + rest

    def cache_index(self, index: Array, cache_shape: tuple[int, int]) -> Array:
        """Returns where it keeps each token's KV, block * S + offset; N * S for those of others.

        index: [T], as `Batch.cache_index`, of blocks of S * parts tokens; cache_shape: (N, S).
        """
        (N, S), turn = cache_shape, self.parts * self.size
        block, offset = index // (S * self.parts), index % (S * self.parts)
        mine = (block < N) & (offset // self.size % self.parts == self.rank)
        local = offset // turn * self.size + offset % self.size
        return jnp.where(mine, block * S + local, N * S)
