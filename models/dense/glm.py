"""GLM-4: half of each head is turned, in neighbouring pairs; 0414 has four norms a layer."""

from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig, Names
from jaxrunner.models.blocks.reading import block, read_block, rope_sizes
from jaxrunner.models.rope import read_rope

NAMES = Names(gate_up=("mlp.gate_up_proj",))
NAMES_0414 = Names(
    gate_up=NAMES.gate_up,
    attn_end_norm="post_self_attn_layernorm",
    mlp_end_norm="post_mlp_layernorm",
)


def read(settings: Settings) -> BlockConfig:
    """Reads a config of GLM-4's first release."""
    return _read(settings, NAMES)


def read_0414(settings: Settings) -> BlockConfig:
    """Reads a config of GLM-4-0414."""
    return _read(settings, NAMES_0414)


def _read(settings: Settings, names: Names) -> BlockConfig:
    return read_block(
        settings,
        head_dim=128,
        eps=1.5625e-7,
        rope=read_rope(settings, *rope_sizes(settings, 128), turned=0.5),
        neighbours=True,
        qkv_bias=settings.take("attention_bias", bool, True),
        names=names,
    )


glm = block._replace(read=read)
glm4 = block._replace(read=read_0414)
