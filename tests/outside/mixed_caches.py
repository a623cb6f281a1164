"""A decoder whose layers each keep something else: a state, latents, keys of a window, all keys.

No published family combines them; the layers are those of LFM2, DeepSeek-V2 and Llama.
"""

from dataclasses import dataclass
from typing import Any

import jax

from jaxrunner import pytree
from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.caches.full import FullAttention
from jaxrunner.caches.state import RecurrentState
from jaxrunner.caches.window import SlidingWindow
from jaxrunner.hf_config import Settings
from jaxrunner.model import Model
from jaxrunner.models import llama
from jaxrunner.models.hybrids.hybrid import Params
from jaxrunner.models.hybrids.lfm2 import ConvLayer
from jaxrunner.models.mixtures.deepseek import read_v2
from jaxrunner.models.mixtures.latent import LatentConfig, LatentLayer
from tests.outside.sources import whole

WINDOW, TAPS = 5, 2
CLASSES = ConvLayer, LatentLayer, llama.Layer, llama.Layer


@dataclass(frozen=True, kw_only=True)
class Config(LatentConfig):
    """A DeepSeek without experts, of which one layer is latent."""

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """One kind for each layer."""
        _, latent, *_ = super().cache_kinds
        state = RecurrentState(taps=TAPS, channels=self.hidden_size)
        return state, latent, SlidingWindow(WINDOW), FullAttention()

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`, with the class of each layer."""
        dims, E = super().dims, self.hidden_size
        layers = [{**flags, "class": c} for flags, c in zip(dims["Y"], CLASSES, strict=True)]
        conv = dict(gates=3, mix_groups=E, inner=E, conv_width=TAPS + 1, conv_bias=False)
        return dims | conv | dict(Y=tuple(layers))


def read(settings: Settings) -> Config:
    """Reads config.json."""
    own: dict[str, Any] = dict(windows=(None, None, WINDOW, None))
    return Config(**vars(read_v2(settings)) | own)


def sources(config: Config) -> Params:
    """Returns where each weight lies: in a tensor of its path and shape."""
    like = pytree.abstract(Params, config.dims | dict(param="float32"))
    return jax.tree_util.tree_map_with_path(
        lambda path, x: whole(jax.tree_util.keystr(path, simple=True, separator="."), *x.shape),
        like,
    )


mixed_caches = Model(read, Params, llama.embed, llama.layers, llama.logits, sources)
