"""StarCoder2: LayerNorm, biases everywhere, and an MLP without a gate. arXiv:2402.19173."""

from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig, Names
from jaxrunner.models.blocks.reading import SLIDING, block, read_block

NAMES = Names(gate_up=("mlp.c_fc",), down="mlp.c_proj")


def read(settings: Settings) -> BlockConfig:
    """Reads a StarCoder2 config."""
    usual = dict(mlp_type="default", norm_type="layer_norm", scale_attn_weights=True)
    for key, value in usual.items():
        settings.expect(key, value)
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        settings.take(key, bool, True)  # softmax is in float32 whatever they say
    for key in ("activation_function", "layer_norm_epsilon"):
        settings.take(key, (str, float), "")  # `hidden_act` and `norm_epsilon` count
    bias = settings.take("use_bias", bool, True)
    return read_block(
        settings.renamed(norm_epsilon="rms_norm_eps"),
        eps=1e-5,
        activation="gelu_pytorch_tanh",
        tied=True,
        kinds=(SLIDING,) * settings.size("num_hidden_layers"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gated=False,
        norm="layer",
        norm_bias=True,
        names=NAMES,
    )


starcoder2 = block._replace(read=read)
