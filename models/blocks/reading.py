"""Readers of `config.json` that families with layers of `blocks` share."""

from collections.abc import Sequence
from typing import Any

from jaxrunner.api.validation import shown
from jaxrunner.config import read_over_0
from jaxrunner.hf_config import Settings
from jaxrunner.model import Model
from jaxrunner.models.blocks import forward
from jaxrunner.models.blocks.description import BlockConfig
from jaxrunner.models.blocks.sources import sources
from jaxrunner.models.blocks.weights import Params
from jaxrunner.models.decoder_config import read_sizes
from jaxrunner.models.rope import Rope, no_rope, read_rope

MAX_LEN = "max_position_embeddings"
FULL, SLIDING = "full_attention", "sliding_attention"
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "relu": "relu",
    "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip


def read_block(
    settings: Settings,
    *,
    head_dim: int = 0,
    eps: float = 1e-6,
    activation: str = "silu",
    tied: bool = False,
    window: int = 0,
    rope: Rope | dict[str, Rope] | None = None,
    kinds: Sequence[str] = (),
    **traits: Any,
) -> BlockConfig:
    """Reads what all these families have in common; `traits` are the family's own fields.

    head_dim, eps, activation, tied, window: of the family where the config does not say.
    rope: of all layers, or by their kind; read here where it is None.
    kinds: of each layer, as `read_kinds` returns them; all see all tokens where there are none.

    Raises:
      ValueError: a setting that is missing, unknown or not supported; names it.
    """
    fields = read_sizes(settings, head_dim, eps)
    D, layers = fields["head_dim"], fields["num_hidden_layers"]
    named = settings.take("hidden_act", str, activation)
    if named not in ACTIVATIONS:
        raise ValueError(f"hidden_act must be one of {sorted(ACTIVATIONS)}, got {shown(named)}")
    kinds = kinds or (FULL,) * layers
    rope = rope or read_rope(settings, D, fields[MAX_LEN])
    if not isinstance(rope, dict):
        rope = {FULL: rope, SLIDING: rope}
    window = settings.size("sliding_window", 0 if "sliding_window" in settings else window, least=0)
    traits = dict(ropes=tuple(rope[kind] for kind in kinds)) | traits
    settings.finish()
    fields |= dict(
        rope=rope[FULL],
        windows=tuple(window if window and kind == SLIDING else None for kind in kinds),
        activation=ACTIVATIONS[named],
        tie_word_embeddings=settings.take("tie_word_embeddings", bool, tied),
    )
    return BlockConfig(**fields | traits)


def read_kinds(settings: Settings, pattern: int) -> list[str]:
    """Returns the kind of each layer: as listed in `layer_types`, else every `pattern`-th is full.

    pattern: 0 where all are full.

    Raises:
      ValueError: `layer_types` lists other kinds, or another number.
    """
    num = settings.size("num_hidden_layers")
    default = [SLIDING if pattern and (i + 1) % pattern else FULL for i in range(num)]
    kinds = settings.each("layer_types", str, default)
    if len(kinds) != num or not set(kinds) <= {FULL, SLIDING}:
        raise ValueError(
            f"layer_types must name {FULL} or {SLIDING} for {num} layers, got {shown(kinds)}"
        )
    return kinds


def read_cap(settings: Settings, key: str, default: float | None = None) -> float | None:
    """Returns the value of a soft-cap; None where there is none.

    Raises:
      ValueError: it is not over 0.
    """
    cap = settings.take(key, float, 0.0 if key in settings else default)
    return read_over_0(key, cap) if cap else None


def rope_sizes(settings: Settings, head_dim: int = 0) -> tuple[int, int]:
    """Returns what a rotation is read for: the size of heads, and the longest sequence.

    `head_dim` is the family's default, 0 where it is derived from the hidden size.
    """
    heads, hidden = settings.size("num_attention_heads"), settings.size("hidden_size")
    return settings.size("head_dim", head_dim or hidden // heads), settings.size(MAX_LEN)


def no_ropes(rope: Rope, head_dim: int, turned: Sequence[Any]) -> tuple[Rope, ...]:
    """Returns the rotation of each layer, of which some turn nothing."""
    return tuple(rope if turns else no_rope(head_dim) for turns in turned)


block = Model(
    read_block,
    Params,
    forward.embed,
    forward.layers,
    forward.logits,
    sources,
    tensor_parallel=True,
)
