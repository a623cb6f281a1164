"""Nemotron-H: each layer is a Mamba-2 mixer, attention, an MLP or experts, and no more than that.

Attention turns nothing; units are squares of what is over 0. arXiv:2504.03624, arXiv:2512.20848.
"""

from dataclasses import dataclass
import functools
from typing import Any

import numpy as np

from jaxrunner.api.validation import shown
from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.caches.full import FullAttention
from jaxrunner.caches.nothing import Nothing
from jaxrunner.hf_config import Settings
from jaxrunner.mixtures.experts import Experts
from jaxrunner.model import Model, Source
from jaxrunner.models import llama
from jaxrunner.models.hybrids.hybrid import FULL, Params
from jaxrunner.models.hybrids.mamba2 import MixerConfig, mixer_sources, read_mixer
from jaxrunner.models.hybrids.one_mixer import (
    AttentionLayer,
    ExpertsLayer,
    MambaLayer,
    MlpLayer,
    layers,
)
from jaxrunner.models.mixtures.mixture import (
    MixtureConfig,
    read_balanced_router,
    read_mixture,
    router_source,
)
from jaxrunner.models.rope import no_rope
from jaxrunner.models.sources import product_source, renamed
from jaxrunner.ops.routing import RouterConfig
from jaxrunner.pytree import host_value

MAMBA, MLP, EXPERTS = "linear_attention", "mlp", "moe"
# Letters of `hybrid_override_pattern`.
PATTERN = {"M": MAMBA, "*": FULL, "-": MLP, "E": EXPERTS}
OLDER = dict(mamba=MAMBA, attention=FULL)
NAMES = {
    "model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f",
    "model.layers": "backbone.layers",
}  # fmt: skip
CLASSES = {MAMBA: MambaLayer, FULL: AttentionLayer, MLP: MlpLayer, EXPERTS: ExpertsLayer}
# Bamba's names of settings, and what transformers has for those that a config leaves out.
SETTINGS = dict(
    mamba_num_heads="mamba_n_heads", mamba_head_dim="mamba_d_head", n_groups="mamba_n_groups",
    ssm_state_size="mamba_d_state", conv_kernel="mamba_d_conv", use_conv_bias="mamba_conv_bias",
    use_bias="mamba_proj_bias", chunk_size="mamba_chunk_size", expand="mamba_expand",
    layer_norm_epsilon="rms_norm_eps", attention_head_dim="head_dim",
)  # fmt: skip
USUAL = dict(
    mamba_n_heads=128, mamba_d_head=64, mamba_n_groups=8, mamba_d_state=128, rms_norm_eps=1e-5,
    head_dim=128, num_key_value_heads=8, moe_intermediate_size=7688, n_routed_experts=8,
    num_experts_per_tok=2,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(MixtureConfig):
    """A mixture whose layers are of four kinds, and its mixers."""

    kinds: tuple[str, ...]  # of each layer
    mixer: MixerConfig
    moe_latent_size: int  # that tokens have for experts; 0 for that of hidden states

    @property
    def concurrent_kernels(self) -> bool:
        """Whether kernels of a step may run at once: small ones around a state."""
        return True

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kind of each layer: keys and values of all tokens, a state, or nothing."""
        kept = {MAMBA: self.mixer.state, FULL: FullAttention()}
        return tuple(kept.get(kind, Nothing()) for kind in self.kinds)

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        gates: dict[str, Any] = {EXPERTS: dict(gate_up=1)}  # that are none
        of_layer = tuple({"class": CLASSES[kind], **gates.get(kind, {})} for kind in self.kinds)
        inner = self.moe_latent_size or self.hidden_size
        latent = dict(latent=self.moe_latent_size > 0, expert_inputs=inner)
        return super().dims | self.mixer.dims | latent | dict(Y=of_layer)


def read(settings: Settings) -> NemotronHConfig:
    """Reads a Nemotron-H config.

    Raises:
      ValueError: layers of other kinds; or what transformers leaves out of the maths is asked for.
    """
    kinds = _read_kinds(settings)
    settings = settings.renamed(**SETTINGS).with_defaults(**USUAL, num_hidden_layers=len(kinds))
    settings.expect("num_hidden_layers", len(kinds))
    settings.expect("norm_eps", settings.take("rms_norm_eps", float))
    wanted = dict(mlp_hidden_act="relu2", mamba_hidden_act="silu", attention_bias=False,
                  residual_in_fp32=False, sliding_window=None)  # fmt: skip
    for key, value in wanted.items():
        settings.expect(key, value)
    # Of training, of programs that serve, and of layers that draft, which are not read.
    settings.ignore(
        "rescale_prenorm_residual", "use_mamba_kernels", "moe_shared_expert_overlap",
        "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
        "n_shared_experts",
    )  # fmt: skip
    inner = settings.size("mamba_n_heads") * settings.size("mamba_d_head")
    own: dict[str, Any] = dict(
        kinds=kinds,
        mixer=read_mixer(settings, inner),
        mlp_bias=settings.take("mlp_bias", bool, False),
        rope=no_rope(settings.size("head_dim")),
        choice_bias=True,
        shared_expert_intermediate_size=settings.size("moe_shared_expert_intermediate_size", 7688),
        moe_latent_size=settings.size("moe_latent_size", 0, least=0),
    )
    router = read_balanced_router(settings, "n_routed_experts")
    return read_mixture(
        settings,
        router if EXPERTS in kinds else RouterConfig(1, 1),
        sparse=tuple(kind == EXPERTS for kind in kinds),
        kind=NemotronHConfig,
        **own,
    )


def _read_kinds(settings: Settings) -> tuple[str, ...]:
    """Returns the kind of each layer, of a list or of a text with a letter for each."""
    pattern = settings.take("hybrid_override_pattern", str, "")
    listed = settings.each("layers_block_type", str, settings.each("layer_types", str, []))
    listed = listed or [PATTERN.get(letter, letter) for letter in pattern]
    kinds: tuple[str, ...] = tuple(OLDER[kind] if kind in OLDER else kind for kind in listed)
    if not kinds or not {*kinds} <= {*CLASSES}:
        raise ValueError(
            f"layers_block_type must name {', '.join(CLASSES)}, or hybrid_override_pattern be of "
            f"{''.join(PATTERN)}, got {shown(listed)}"
        )
    return kinds


def sources(config: NemotronHConfig) -> Params:
    """Returns where each weight lies in a Hugging Face checkpoint."""
    of = {MAMBA: _mamba, FULL: _attention, MLP: _mlp, EXPERTS: _experts}
    prefixes = [f"model.layers.{i}." for i in range(config.num_hidden_layers)]
    layers = tuple(
        host_value(
            CLASSES[kind],
            attn_norm=Source.whole(f"{prefix}norm.weight", config.hidden_size),
            **of[kind](config, f"{prefix}mixer."),
        )
        for prefix, kind in zip(prefixes, config.kinds, strict=True)
    )
    return renamed(host_value(Params, **llama.outer_sources(config), layers=layers), NAMES)


def _mamba(c: NemotronHConfig, at: str) -> dict[str, Any]:
    return mixer_sources(c.mixer, at, c.hidden_size)


def _attention(c: NemotronHConfig, at: str) -> dict[str, Any]:
    found = llama.attention_sources(c, at, c.hidden_size)
    return renamed({name: found[name] for name in ("qkv", "o")}, {"self_attn.": ""})


def _mlp(c: NemotronHConfig, at: str) -> dict[str, Any]:
    return _pair(c, at, ("up_proj", "down_proj"), c.intermediate_size, ("up", "down"))


def _pair(
    c: NemotronHConfig, at: str, names: tuple[str, str], inner: int, fields: tuple[str, str]
) -> dict[str, Any]:
    """Returns the sources of two products, of E to `inner` and back."""
    shapes = (inner, c.hidden_size), (c.hidden_size, inner)
    return {
        field: product_source(f"{at}{name}", *shape, bias=c.mlp_bias)
        for field, name, shape in zip(fields, names, shapes, strict=True)
    }


def _experts(c: NemotronHConfig, at: str) -> dict[str, Any]:
    X, F, latent = c.router.num_experts, c.moe_intermediate_size, c.moe_latent_size
    E = latent or c.hidden_size
    ups, downs = (
        tuple(f"{at}experts.{i}.{name}_proj.weight" for i in range(X)) for name in ("up", "down")
    )
    experts = host_value(
        Experts,
        gate_up=Source(ups, ((F, E),) * X, lambda a: np.stack(a)[:, None], lambda a: [*a[:, 0]]),
        down=Source(downs, ((E, F),) * X, np.stack, list),
        gate_up_bias=None,
        down_bias=None,
        activation="relu2",
    )
    pair = functools.partial(_pair, c)
    names, fields = ("fc1_latent_proj", "fc2_latent_proj"), ("latent_in", "latent_out")
    shared = ("up_proj", "down_proj"), c.shared_expert_intermediate_size
    return dict(
        router=router_source(c, f"{at}gate"),
        experts=experts,
        **(pair(at, names, latent, fields) if latent else dict.fromkeys(fields)),
        **pair(f"{at}shared_experts.", *shared, ("shared_up", "shared_down")),
    )


nemotron_h = Model(
    read, Params, llama.embed, layers, llama.logits, sources, spare=("mtp.",), tensor_parallel=True
)
