"""OLMo 2 and 3: norms behind each half, and of whole queries and keys. arXiv:2501.00656."""

from typing import Any

from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig, Names
from jaxrunner.models.blocks.reading import block, read_block, read_kinds, rope_sizes
from jaxrunner.models.rope import read_two_ropes

NAMES = Names(
    attn_norm="",
    attn_end_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_end_norm="post_feedforward_layernorm",
)


def read_2(settings: Settings) -> BlockConfig:
    """Reads an OLMo 2 config."""
    return _read(settings)


def read_3(settings: Settings) -> BlockConfig:
    """Reads an OLMo 3 config, which scales the rotation of layers without a window alone."""
    local = "rope_theta", 5e5
    rope = read_two_ropes(settings, *rope_sizes(settings), theta=5e5, local=local)
    return _read(settings, rope=rope, kinds=read_kinds(settings, 4), window=4096)


def _read(settings: Settings, **traits: Any) -> BlockConfig:
    settings.expect("clip_qkv", None)
    bias = settings.take("attention_bias", bool, False)
    return read_block(
        settings,
        eps=1e-5,
        qkv_bias=bias,
        o_bias=bias,
        qk_width_norm=True,
        names=NAMES,
        **traits,
    )


olmo2 = block._replace(read=read_2)
olmo3 = block._replace(read=read_3)
