"""EmbeddingGemma: the text model of Gemma 3, whose attention looks both ways. arXiv:2509.20354."""

from dataclasses import dataclass

from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.caches.encoder_only import EncoderOnly
from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig
from jaxrunner.models.dense.gemma import gemma3, read_3
from jaxrunner.models.encoders.encoder import layers


@dataclass(frozen=True)
class BothWays(BlockConfig):
    """A Gemma 3 that keeps nothing of a text."""

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """Nothing, in each layer."""
        return (EncoderOnly(),) * self.num_hidden_layers


def read(settings: Settings) -> BlockConfig:
    """Reads the config of a text model that looks both ways.

    Raises:
      ValueError: it looks back alone.
    """
    if settings.take("use_bidirectional_attention", bool, False) is not True:
        raise ValueError(
            "use_bidirectional_attention must be true in a Gemma3TextModel, got false: one that "
            "looks back alone is a Gemma3ForCausalLM, put that into architectures by hf_overrides"
        )
    window = settings.size("sliding_window", 4096) // 2 + 1  # to each side, itself included
    settings = settings.without("use_bidirectional_attention")
    return BothWays(**vars(read_3(settings.with_value("sliding_window", window))))


gemma_embedding = gemma3._replace(read=read, layers=layers, tensor_parallel=False, samples=False)
