"""The prefixes that an engine caches, where a user left that open."""

from collections.abc import Mapping
from typing import Any

from jaxrunner.caches.cache_group import has_checkpoints
from jaxrunner.config import EngineConfig
from jaxrunner.loading.loader import Loaded

INTERVAL = 512  # tokens between checkpoints of states, at least: a step's chunks end there


def prefix_sizes(loaded: Loaded, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of `EngineConfig`: prefixes are cached by default where all layers have keys.

    asked: what a user said of such fields. States have checkpoints where prefixes are asked for.

    Raises:
      ValueError: prefixes are to be cached, and a layer keeps nothing of them; or there are no
        states, and sizes of them.
    """
    kinds, name = loaded.config.cache_kinds, loaded.config.architecture
    enable, interval = asked.get("enable_prefix_caching"), asked.get("mamba_block_size")
    with_keys = all(kind.has_prefixes for kind in kinds)
    enable = with_keys if enable is None else enable
    found = [kind for kind in kinds if not (kind.has_prefixes or has_checkpoints([kind]))]
    if enable and found:
        raise ValueError(
            "enable_prefix_caching=True wants caches whose beginnings serve other requests, "
            f"{name} has {type(found[0]).__name__}: leave it out"
        )
    if not has_checkpoints(kinds):
        if interval is not None:
            raise ValueError(
                f"mamba_block_size={interval} is of layers with states, {name} has none: leave it "
                "out"
            )
    elif enable and interval is None:
        size = asked.get("block_size", EngineConfig.block_size)
        interval = -(-INTERVAL // size) * size
    return dict(enable_prefix_caching=enable, mamba_block_size=interval)
