"""GPT-2: learned positions, LayerNorm, one product for query, key and value."""

from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig, Names
from jaxrunner.models.blocks.reading import block, read_block
from jaxrunner.models.rope import no_rope

KEYS = dict(
    n_embd="hidden_size", n_head="num_attention_heads", n_layer="num_hidden_layers",
    n_positions="max_position_embeddings", n_inner="intermediate_size",
    activation_function="hidden_act", layer_norm_epsilon="rms_norm_eps",
)  # fmt: skip
NAMES = Names(
    layer="transformer.h.{}.",
    embed="transformer.wte",
    positions="transformer.wpe",
    norm="transformer.ln_f",
    attn_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
)


def read(settings: Settings) -> BlockConfig:
    """Reads a GPT-2 config."""
    usual = dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    for key, value in (usual | dict(add_cross_attention=False)).items():
        settings.expect(key, value)
    settings.take("reorder_and_upcast_attn", bool, False)  # softmax is in float32 anyway
    settings.take("n_ctx", int, 0)  # the same as `n_positions`
    settings = settings.renamed(**KEYS)
    hidden = settings.size("hidden_size")
    inner = settings.size("intermediate_size", 4 * hidden)
    return read_block(
        settings.with_value("intermediate_size", inner),
        eps=1e-5,
        activation="gelu_new",
        tied=True,
        rope=no_rope(hidden // settings.size("num_attention_heads")),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        norm="layer",
        norm_bias=True,
        names=NAMES,
    )


gpt2 = block._replace(read=read)
