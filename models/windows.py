"""Windows of layers that `layer_types` names."""

from collections.abc import Sequence

from jaxrunner.api.validation import shown
from jaxrunner.hf_config import Settings

KINDS = ("full_attention", "sliding_attention")


def layer_windows(
    settings: Settings, window: int, default: Sequence[bool]
) -> tuple[int | None, ...]:
    """Returns each layer's window: `window` where `layer_types` names one, None elsewhere.

    default: which layers have one where nothing is named. A window of 0 is none.

    Raises:
      ValueError: `layer_types` names other kinds, or of another number of layers.
    """
    kinds = settings.each("layer_types", str, [KINDS[slides] for slides in default])
    if len(kinds) != len(default) or not set(kinds) <= {*KINDS}:
        raise ValueError(
            f"layer_types must name full_attention or sliding_attention for {len(default)} layers, "
            f"got {shown(kinds)}"
        )
    return tuple(window or None if kind == KINDS[1] else None for kind in kinds)
