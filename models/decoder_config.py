"""The config of a Llama-like decoder: sizes, and flags of families with another bias or norm."""

from dataclasses import dataclass
from typing import Any

from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.caches.full import FullAttention
from jaxrunner.caches.window import SlidingWindow
from jaxrunner.models.rope import Rope


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
