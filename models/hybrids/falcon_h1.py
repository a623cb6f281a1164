"""Falcon-H1: Mamba-2 beside attention in every layer; products are scaled. arXiv:2507.22448."""

from dataclasses import dataclass, replace
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.api.validation import shown
from jaxrunner.caches.cache_group import CacheKind, layer_groups
from jaxrunner.caches.full import FullAttention
from jaxrunner.hf_config import Settings
from jaxrunner.model import AttentionSpec, Model, Ops, RopeAndNorm
from jaxrunner.models import llama
from jaxrunner.models.decoder_config import DecoderConfig, read_decoder
from jaxrunner.models.hybrids.bamba import NAMES
from jaxrunner.models.hybrids.mamba2 import Mixer, MixerConfig, mixer_sources, read_mixer
from jaxrunner.models.llama import Turn
from jaxrunner.models.sources import mlp_sources, renamed
from jaxrunner.ops.plain import summed
from jaxrunner.pytree import each, host_value, pytree
from jaxrunner.types import Array, Inputs

MULTIPLIERS = (
    "embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier",
    "attention_out_multiplier", "ssm_out_multiplier",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(DecoderConfig):
    """A decoder, its mixers, and what products are multiplied by."""

    mixer: MixerConfig
    embedding_multiplier: float
    lm_head_multiplier: float
    key_multiplier: float
    attention_in_multiplier: float
    attention_out_multiplier: float
    ssm_out_multiplier: float
    mlp_multipliers: tuple[float, float]  # of gates, before their activation, and of the MLP

    @property
    def concurrent_kernels(self) -> bool:
        """Whether kernels of a step may run at once: those of attention and of the mixer."""
        return True

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kinds of the layers: keys and values of each, then the state of each."""
        num = self.num_hidden_layers
        return (FullAttention(),) * num + (self.mixer.state,) * num

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        return super().dims | self.mixer.dims


@pytree
class FalconH1Layer(llama.Layer, Mixer):
    """Weights of one layer, whose cache is a pair: keys and values, and the mixer's state."""

    def attend(
        self, config: FalconH1Config, ops: Ops, h: Array, turn: Turn, cache: Any,
        spec: AttentionSpec,
    ) -> tuple[Array, Any]:  # fmt: skip
        """Returns what attention and the mixer add to the residual, given h, [T, E]; and the
        cache."""
        c, (kv, state) = config, cache
        mixed, state = self.mix(c, ops, h, state, layer_groups(c.cache_kinds)[-1])
        qkv = ops.linear(h * c.attention_in_multiplier, self.qkv)
        scales = [1.0] * (qkv.shape[2] - 2) + [c.key_multiplier, 1.0]
        qkv *= jnp.asarray(scales, qkv.dtype)[None, None, :, None]
        heads = RopeAndNorm(*turn, None, None, c.rms_norm_eps)
        out, kv = ops.rotate_attend(qkv, heads, kv, spec)
        attended = summed(ops.project(out, self.o), jnp.float32) * c.attention_out_multiplier
        residual = attended + summed(mixed, jnp.float32) * c.ssm_out_multiplier
        return residual.astype(h.dtype), (kv, state)

    def feed_forward(
        self, config: FalconH1Config, ops: Ops, h: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Returns what the MLP adds to the residual, given h, [T, E]; and no extras."""
        of_gate, of_all = config.mlp_multipliers
        gate, up = jnp.moveaxis(ops.linear(h, self.gate_up), 1, 0)
        return ops.project(up * jax.nn.silu(gate * of_gate), self.down) * of_all, {}


@pytree
class Params(llama.Params):
    """Weights of the model."""

    layers: tuple[FalconH1Layer, ...] = each("Y")


def layers(
    config: FalconH1Config, params: Params, x: Array, kv: tuple[Any, ...], inputs: Inputs, ops: Ops,
    *, first: int = 0, last: int | None = None, extras: tuple[str, ...] = (),
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:  # fmt: skip
    """Runs layers `first` to `last` as `llama.layers` does; kv: as `cache_kinds` has them."""
    num = (config.num_hidden_layers if last is None else last) - first
    pairs = zip(kv[:num], kv[num:] or (None,) * num, strict=True)  # a trainer's are None
    x, pairs, found = llama.layers(
        config, params, x, tuple(pairs), inputs, ops, first=first, last=last, extras=extras
    )
    return x, tuple(itertools.chain(*zip(*pairs, strict=True))), found


def logits(config: FalconH1Config, params: Params, hidden: Array) -> Array:
    """Scores every token of the vocabulary: hidden [..., E] -> [..., V], in its dtype."""
    return llama.logits(config, params, hidden) * config.lm_head_multiplier


def read(settings: Settings) -> FalconH1Config:
    """Reads a Falcon-H1 config."""
    settings = settings.with_defaults(rms_norm_eps=1e-5, num_key_value_heads=8)
    settings.expect("mamba_use_mlp", True)
    settings.expect("projectors_bias", settings.take("mamba_proj_bias", bool, False))
    settings.ignore("mlp_expansion_factor", "num_logits_to_keep", "layers_block_type",
                    "layer_types", "attn_layer_indices")  # fmt: skip
    into = settings.take("ssm_in_multiplier", float, 1.0)
    own: dict[str, Any] = {name: settings.take(name, float, 1.0) for name in MULTIPLIERS}
    own["mlp_multipliers"] = _read_scales(settings, "mlp_multipliers", 2)
    scales = _read_scales(settings, "ssm_multipliers", 5)
    inner = settings.size("mamba_d_ssm", 0 if "mamba_d_ssm" in settings else 1024, least=0)
    before = settings.take("mamba_norm_before_gate", bool, True)
    norm = "before gate" if before else "behind gate"
    norm = norm if settings.take("mamba_rms_norm", bool, False) else ""
    own["mixer"] = replace(read_mixer(settings, inner), norm=norm, scales=scales, into=into)
    bias = settings.take("attention_bias", bool, False)
    flags = dict(qkv_bias=bias, o_bias=bias, mlp_bias=settings.take("mlp_bias", bool, False))
    return FalconH1Config(**vars(read_decoder(settings, **flags)) | own)


def _read_scales(settings: Settings, key: str, num: int) -> tuple[float, ...]:
    found = settings.take(key, list, [1.0] * num)
    if len(found) != num or not all(type(one) in (int, float) for one in found):
        raise ValueError(f"{key} must be {num} numbers, got {shown(found)}")
    return tuple(map(float, found))


def sources(config: FalconH1Config) -> Params:
    """Returns where each weight lies in a Hugging Face checkpoint."""
    c, E = config, config.hidden_size
    prefixes = [f"model.layers.{i}." for i in range(c.num_hidden_layers)]
    layers = tuple(
        host_value(
            FalconH1Layer,
            **llama.attention_sources(c, prefix, E),
            **mlp_sources(f"{prefix}mlp.", c.intermediate_size, E, bias=c.mlp_bias),
            **mixer_sources(c.mixer, f"{prefix}mamba.", E),
        )
        for prefix in prefixes
    )
    return renamed(host_value(Params, **llama.outer_sources(c), layers=layers), NAMES)


falcon_h1 = Model(read, Params, llama.scaled_embed, layers, logits, sources, tensor_parallel=True)
