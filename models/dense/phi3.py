"""Phi-3 and Phi-4: Llama with fused products, partial and long rotation. arXiv:2404.14219."""

from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig, Names
from jaxrunner.models.blocks.reading import SLIDING, block, read_block, rope_sizes
from jaxrunner.models.rope import read_rope

NAMES = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def read(settings: Settings) -> BlockConfig:
    """Reads a Phi-3 config."""
    for key, usual in dict(interpolate_factor=1, full_attn_mod=1).items():
        settings.expect(key, usual)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        settings.expect(key, False)
    return read_block(
        settings,
        eps=1e-5,
        rope=read_rope(settings, *rope_sizes(settings), turned=1.0),
        kinds=(SLIDING,) * settings.size("num_hidden_layers"),
        names=NAMES,
    )


phi3 = block._replace(read=read)
