"""OLMo 2 and 3: norms behind each half, and of whole queries and keys. arXiv:2501.00656."""

from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig, Names
from jaxrunner.models.blocks.reading import block, read_block, read_kinds
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
    heads, max_len = (settings.size(f) for f in ("num_attention_heads", "max_position_embeddings"))
    head_dim = settings.size("head_dim", settings.size("hidden_size") // heads)
    rope = read_two_ropes(settings, head_dim, max_len, theta=5e5, local=("rope_theta", 5e5))
    return _read(settings, rope=rope, kinds=read_kinds(settings, 4), window=4096)


def _read(settings: Settings, **traits) -> BlockConfig:
    settings.expect("clip_qkv", None)
    bias = settings.take("attention_bias", bool, False)
    flags = dict(qkv_bias=bias, o_bias=bias, qk_width_norm=True, names=NAMES)
    return read_block(settings, eps=1e-5, **flags | traits)


# A device has a part of the heads, and the norm of queries is over all.
olmo2 = block._replace(read=read_2, tensor_parallel=False)
olmo3 = block._replace(read=read_3, tensor_parallel=False)
