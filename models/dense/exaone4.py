"""EXAONE 4: norms behind each half, windows, and NoPE in layers without one. arXiv:2507.11407."""

from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig
from jaxrunner.models.blocks.reading import (
    SLIDING,
    block,
    no_ropes,
    read_block,
    read_kinds,
    rope_sizes,
)
from jaxrunner.models.dense.olmo import NAMES
from jaxrunner.models.rope import read_rope


def read(settings: Settings) -> BlockConfig:
    """Reads an EXAONE 4 config; without a window all layers see all tokens, and turn."""
    head_dim, max_len = rope_sizes(settings)
    rope = read_rope(settings, head_dim, max_len)
    absent = 0 if "sliding_window" in settings else 4096
    window = settings.size("sliding_window", absent, least=0)
    pattern = settings.take("sliding_window_pattern", (int, str), 4)
    if isinstance(pattern, str):  # "LLLG", which `layer_types` then says too
        settings.take("layer_types", list)
        pattern = 0
    kinds = read_kinds(settings, pattern if window else 0)
    turned = [not window or kind == SLIDING for kind in kinds]
    return read_block(
        settings,
        eps=1e-5,
        window=4096,
        rope=rope,
        ropes=no_ropes(rope, head_dim, turned),
        kinds=kinds,
        qk_norm=True,
        names=NAMES,
    )


exaone4 = block._replace(read=read)
