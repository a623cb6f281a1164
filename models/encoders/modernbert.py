"""ModernBERT: rotary positions, windows in most layers, GeGLU. arXiv:2412.13663."""

from dataclasses import dataclass
from typing import Any

from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import Names
from jaxrunner.models.blocks.reading import FULL, SLIDING, read_block, read_kinds
from jaxrunner.models.encoders.encoder import EncoderConfig, encoder
from jaxrunner.models.rope import read_two_ropes

NAMES = Names(
    layer="model.layers.{}.",
    embed="model.embeddings.tok_embeddings",
    norm="model.final_norm",
    attn_norm="attn_norm",
    mlp_norm="mlp_norm",
    qkv=("attn.Wqkv",),
    o="attn.Wo",
    gate_up=("mlp.Wi",),
    down="mlp.Wo",
)
OF_OTHER_HEADS = (
    "classifier_pooling", "classifier_bias", "classifier_activation", "decoder_bias",
    "sparse_prediction", "sparse_pred_ignore_index", "deterministic_flash_attn",
    "reference_compile", "repad_logits_with_grad", "embedding_dropout", "cls_token_id",
    "mlp_dropout",
)  # fmt: skip


@dataclass(frozen=True)
class ModernBertConfig(EncoderConfig):
    """An `EncoderConfig` whose first layer reads embeddings that are normed already."""

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        rest = [dict[str, Any]()] * (self.num_hidden_layers - 1)
        return super().dims | dict(Y=[dict(attn_norm=False), *rest])


def read(settings: Settings) -> ModernBertConfig:
    """Reads a config."""
    settings.ignore(*OF_OTHER_HEADS)
    # Published configs say so beside rotary positions, and transformers does not read it.
    settings.expect("position_embedding_type", "absolute")
    settings = settings.renamed(
        hidden_activation="hidden_act", norm_eps="rms_norm_eps", global_rope_theta="rope_theta"
    )
    heads = settings.size("num_attention_heads")
    width, num = settings.size("hidden_size") // heads, settings.size("num_hidden_layers")
    max_len = settings.size("max_position_embeddings", 8192)
    local = "local_rope_theta", 1e4
    every = settings.size("global_attn_every_n_layers", 3)
    # A list in place of every n-th: the first layer sees all.
    default = [SLIDING if i % every else FULL for i in range(num)]
    if "layer_types" not in settings:
        settings = settings.with_value("layer_types", default)
    bias, mlp_bias = (settings.take(f"{name}_bias", bool, False) for name in ("attention", "mlp"))
    reach = settings.size("local_attention", 128) // 2 + 1  # itself included
    rope = read_two_ropes(settings, width, max_len, theta=160000.0, local=local)
    kinds, norm_bias = read_kinds(settings, 0), settings.take("norm_bias", bool, False)
    config = read_block(
        settings.with_value("sliding_window", reach),
        eps=1e-5,
        activation="gelu",
        tied=True,
        rope=rope,
        kinds=kinds,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=mlp_bias,
        norm="layer",
        norm_bias=norm_bias,
        names=NAMES,
    )
    return ModernBertConfig(**vars(config), first_norm="model.embeddings.norm")


modernbert = encoder._replace(read=read, spare=("head.", "decoder.", "classifier."))
