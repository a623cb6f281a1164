"""SmolLM3: Llama whose every fourth layer turns nothing (NoPE, arXiv:2501.18795)."""

from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig
from jaxrunner.models.blocks.reading import FULL, block, no_ropes, read_block, rope_sizes
from jaxrunner.models.rope import read_rope


def read(settings: Settings) -> BlockConfig:
    """Reads a SmolLM3 config; `no_rope_layers` has a 0 for each layer that turns nothing.

    Raises:
      ValueError: `no_rope_layers` is not of all layers, or a setting is not supported.
    """
    settings = settings.with_value("pretraining_tp", 1)  # of its training, and says 2
    settings.take("max_window_layers", int, 0)
    layers, (head_dim, max_len) = settings.size("num_hidden_layers"), rope_sizes(settings)
    rope = read_rope(settings, head_dim, max_len, theta=2e6)
    every = settings.size("no_rope_layer_interval", 4)
    default = [int((i + 1) % every != 0) for i in range(layers)]
    turned = settings.each("no_rope_layers", int, default)
    if len(turned) != layers:
        raise ValueError(f"no_rope_layers must have a number for {layers} layers, got {turned}")
    settings.expect("use_sliding_window", False)
    settings.expect("layer_types", [FULL] * layers)
    bias = settings.take("attention_bias", bool, False)
    return read_block(
        settings,
        tied=True,
        rope=rope,
        ropes=no_ropes(rope, head_dim, turned),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=settings.take("mlp_bias", bool, False),
    )


smollm3 = block._replace(read=read)
