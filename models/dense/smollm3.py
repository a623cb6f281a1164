"""SmolLM3: Llama whose every fourth layer turns nothing (NoPE, arXiv:2501.18795)."""

from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig
from jaxrunner.models.blocks.reading import FULL, block, no_ropes, read_block
from jaxrunner.models.rope import read_rope


def read(settings: Settings) -> BlockConfig:
    """Reads a SmolLM3 config; `no_rope_layers` has a 0 for each layer that turns nothing."""
    layers, heads = settings.size("num_hidden_layers"), settings.size("num_attention_heads")
    head_dim = settings.size("head_dim", settings.size("hidden_size") // heads)
    rope = read_rope(settings, head_dim, settings.size("max_position_embeddings"), theta=2e6)
    every = settings.size("no_rope_layer_interval", 4)
    default = [int((i + 1) % every != 0) for i in range(layers)]
    turned = settings.each("no_rope_layers", int, default)
    if len(turned) != layers:
        raise ValueError(f"no_rope_layers must have a number for {layers} layers, got {turned}")
    settings.expect("use_sliding_window", False)
    settings.expect("layer_types", [FULL] * layers)
    bias, ropes = settings.take("attention_bias", bool, False), no_ropes(rope, head_dim, turned)
    flags = dict(qkv_bias=bias, o_bias=bias, mlp_bias=settings.take("mlp_bias", bool, False))
    return read_block(settings, tied=True, rope=rope, ropes=ropes, **flags)


smollm3 = block._replace(read=read)
