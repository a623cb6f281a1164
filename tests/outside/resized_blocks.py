"""Llama with KV blocks of several sizes: half the engine's in its first layer, twice elsewhere."""

from dataclasses import dataclass

from jaxrunner.caches.cache_group import CacheKind, PoolSizes
from jaxrunner.caches.full import FullAttention
from jaxrunner.hf_config import Settings
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.llama import llama


@dataclass(frozen=True)
class Resized(FullAttention):
    """Full attention with blocks of `times` / 2 the engine's tokens, and as many tokens in all."""

    times: int

    def pool(self, sizes: PoolSizes) -> tuple[int, int]:
        """Returns the tokens of a block, and the blocks."""
        return sizes.block_size * self.times // 2, sizes.num_blocks * 2 // self.times


@dataclass(frozen=True)
class Config(DecoderConfig):
    """A Llama with other blocks."""

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """Small blocks, then large ones."""
        return Resized(1), *(Resized(4) for _ in self.windows[1:])


def read(settings: Settings) -> Config:
    """Reads config.json."""
    return Config(**vars(llama.read(settings)))


resized = llama._replace(read=read)
