"""The config of a Llama-like decoder: sizes, and flags of families with another bias or norm."""

from dataclasses import dataclass
from typing import Any

from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.caches.full import FullAttention
from jaxrunner.caches.window import SlidingWindow
from jaxrunner.config import read_dtype, read_token_ids
from jaxrunner.hf_config import Settings
from jaxrunner.models.rope import Rope, read_rope


@dataclass(frozen=True)
class DecoderConfig:
    """A `ModelConfig` in Hugging Face's names. Lengths are in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]  # of each layer: keys a token sees, None for all before it
    tie_word_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"  # as stored in the checkpoint
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def longest_len(self) -> int:
        """The most tokens of a sequence: those of dynamic scaling, too."""
        dynamic = self.rope.dynamic
        factor = dynamic.factor if dynamic is not None else 1.0
        return int(self.max_position_embeddings * factor)

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kind of each layer: keys and values of all tokens, or of its window."""
        return tuple(FullAttention() if w is None else SlidingWindow(w) for w in self.windows)

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        H, K = self.num_attention_heads, self.num_key_value_heads
        return dict(
            Y=self.num_hidden_layers, H=H, K=K, P=H // K + 2, D=self.head_dim,
            E=self.hidden_size, F=self.intermediate_size, V=self.vocab_size,
            all_heads=H, all_kv_heads=K, gate_up=2, qkv_bias=self.qkv_bias, o_bias=self.o_bias,
            mlp_bias=self.mlp_bias, qk_norm=self.qk_norm, untied=not self.tie_word_embeddings,
        )  # fmt: skip

    def cache_salt(self, prompt_len: int) -> bytes:
        """What, besides the tokens before it, a cached key depends on."""
        return self.rope.cache_salt(prompt_len)


def read_decoder(
    settings: Settings, *, head_dim: int = 0, partial_rotary: float | None = None, **flags: Any
) -> DecoderConfig:
    """Reads what all Llama-like decoders have in common; `flags` are the family's own fields.

    `head_dim` is the family's default, 0 where it is derived from the hidden size.
    partial_rotary: the `turned` of `read_rope`.
    """
    fields = read_sizes(settings, head_dim)
    settings.expect("hidden_act", "silu", "swish")
    max_len = fields["max_position_embeddings"]
    fields["rope"] = read_rope(settings, fields["head_dim"], max_len, turned=partial_rotary)
    settings.finish()
    return DecoderConfig(**fields | flags)


def read_sizes(settings: Settings, head_dim: int = 0, eps: float = 1e-6) -> dict[str, Any]:
    """Returns what decoders of all kinds have in common: fields of a `DecoderConfig`, not `rope`.

    `head_dim` is as for `read_decoder`, `eps` what norms have where the config does not say.

    Raises:
      ValueError: a size that other ones contradict, or a setting that is not supported; names it.
    """
    heads = settings.size("num_attention_heads")
    kv_heads = settings.size("num_key_value_heads", heads)
    hidden, layers = settings.size("hidden_size"), settings.size("num_hidden_layers")
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}"
        )
    settings.expect("pretraining_tp", 1)
    settings.expect("quantization_config", None)
    bos, eps = read_token_ids(settings, "bos_token_id"), settings.take("rms_norm_eps", float, eps)
    if not 0 <= eps < 1:
        raise ValueError(f"rms_norm_eps must be from 0 to 1, got {eps}: it keeps a norm from zero")
    return dict(
        architecture=settings.take("architectures", list, ["?"])[0],
        vocab_size=settings.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=settings.size("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=settings.size("head_dim", head_dim or hidden // heads),
        max_position_embeddings=settings.size("max_position_embeddings"),
        rms_norm_eps=eps,
        windows=(None,) * layers,
        tie_word_embeddings=settings.take("tie_word_embeddings", bool, False),
        dtype=read_dtype(settings),
        eos_token_ids=read_token_ids(settings, "eos_token_id"),
        bos_token_id=bos[0] if bos else None,
    )
