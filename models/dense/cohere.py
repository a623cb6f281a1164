"""Command R: attention and MLP read one LayerNorm; Command R7B (Cohere 2) has windows and NoPE."""

from jaxrunner.config import read_scale
from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig, Names
from jaxrunner.models.blocks.reading import (
    SLIDING,
    block,
    no_ropes,
    read_block,
    read_kinds,
    rope_sizes,
)
from jaxrunner.models.rope import read_rope

NAMES = Names(mlp_norm="")
USUAL = dict(
    use_qk_norm=False, use_embedding_sharing=True, use_gated_activation=True,
    use_parallel_block=True, use_parallel_embedding=False, position_embedding_type="rope_gptj",
    order_of_interleaved_layers="local_attn_first", rotary_pct=1.0,
)  # fmt: skip


def read(settings: Settings) -> BlockConfig:
    """Reads a Cohere config; one with norms of queries and keys (Command R+) is refused."""
    return _read(settings)


def read_2(settings: Settings) -> BlockConfig:
    """Reads a Cohere 2 config, whose layers without a window turn nothing."""
    pattern = settings.size("sliding_window_pattern", 4)
    settings.expect("layer_switch", pattern)
    return _read(settings, read_kinds(settings, pattern))


def _read(settings: Settings, kinds: list[str] | None = None) -> BlockConfig:
    for key, usual in USUAL.items():
        settings.expect(key, usual)
    settings = settings.renamed(layer_norm_eps="rms_norm_eps")
    head_dim, max_len = rope_sizes(settings)
    rope = read_rope(settings, head_dim, max_len)
    bias = settings.take("attention_bias", bool, False)
    turned = [kind == SLIDING for kind in kinds or (SLIDING,) * settings.size("num_hidden_layers")]
    return read_block(
        settings,
        eps=1e-5,
        tied=True,
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        neighbours=True,
        norm="layer",
        parallel=True,
        logit_scale=read_scale(settings, "logit_scale", 0.0625),
        names=NAMES,
        kinds=kinds or (),
        window=4096,
        ropes=no_ropes(rope, head_dim, turned),
    )


cohere = block._replace(read=read)
cohere2 = block._replace(read=read_2)
