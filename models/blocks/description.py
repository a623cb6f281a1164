"""The config of a decoder with layers of `blocks`: sizes, and the traits that its family has."""

from dataclasses import dataclass, field
from typing import Any

from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.rope import Rope


@dataclass(frozen=True)
class Names:
    """The names of a family's tensors; "" for those that it does not have."""

    layer: str = "model.layers.{}."  # the prefix of layer {}
    embed: str = "model.embed_tokens"
    positions: str = ""
    norm: str = "model.norm"
    head: str = "lm_head"
    attn_norm: str = "input_layernorm"
    attn_end_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_end_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")  # or one, of both or of up alone
    down: str = "mlp.down_proj"
    by_head: bool = False  # one qkv has each head's query, key and value side by side
    transposed: bool = False  # products are [inputs, outputs]


@dataclass(frozen=True)
class BlockConfig(DecoderConfig):
    """A `ModelConfig` of traits. Where a trait is not named, the layer is Llama's."""

    ropes: tuple[Rope, ...] = ()  # of each layer; `rope` is that of layers that see all
    neighbours: bool = False  # whether rotation pairs dimensions 2i and 2i + 1, else D / 2 apart
    query_growth: tuple[float, int] | None = None  # beta, len: q * (1 + beta ln(1 + pos // len))
    score_scale: float = 0.0  # D**-0.5 where 0
    score_cap: float | None = None
    qk_width_norm: bool = False  # queries and keys are normed over all heads together
    norm: str = "rms"  # "rms", "rms of 1 + w" or "layer"
    norm_bias: bool = False
    post_norm: bool = False  # a layer reads norms of sums, and adds to these
    parallel: bool = False  # attention and MLP read the same sum
    activation: str = "silu"
    gated: bool = True
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    logit_cap: float | None = None
    names: Names = field(default_factory=Names, repr=False)

    @property
    def concurrent_kernels(self) -> bool | None:
        """Whether kernels of a step may run at once: not attention beside an MLP, as both wait."""
        return False if self.parallel else None

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        names = self.names
        return super().dims | dict(
            gate_up=2 if self.gated else 1, norm_bias=self.norm_bias,
            qk_width_norm=self.qk_width_norm, learned=bool(names.positions),
            positions=self.max_position_embeddings,
            attn_norm=bool(names.attn_norm), attn_end_norm=bool(names.attn_end_norm),
            mlp_norm=bool(names.mlp_norm), mlp_end_norm=bool(names.mlp_end_norm),
        )  # fmt: skip

    def cache_salt(self, prompt_len: int) -> bytes:
        """What, besides the tokens before it, a cached key depends on."""
        return b"".join(rope.cache_salt(prompt_len) for rope in dict.fromkeys(self.ropes))
