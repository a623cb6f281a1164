"""GPT-NeoX and Pythia: attention and MLP beside each other, a quarter of a head is turned.

arXiv:2204.06745, arXiv:2304.01373.
"""

from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig, Names
from jaxrunner.models.blocks.reading import block, read_block, rope_sizes
from jaxrunner.models.rope import read_rope

KEYS = dict(
    rotary_pct="partial_rotary_factor", rotary_emb_base="rope_theta", layer_norm_eps="rms_norm_eps"
)
NAMES = Names(
    layer="gpt_neox.layers.{}.",
    embed="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv=("attention.query_key_value",),
    by_head=True,
    o="attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


def read(settings: Settings) -> BlockConfig:
    """Reads a GPT-NeoX config."""
    settings = settings.renamed(**KEYS)
    settings.expect("num_key_value_heads", settings.size("num_attention_heads"))
    bias = settings.take("attention_bias", bool, True)
    return read_block(
        settings,
        eps=1e-5,
        activation="gelu",
        rope=read_rope(settings, *rope_sizes(settings), turned=0.25),
        parallel=settings.take("use_parallel_residual", bool, True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        gated=False,
        norm="layer",
        norm_bias=True,
        names=NAMES,
    )


gpt_neox = block._replace(read=read)
