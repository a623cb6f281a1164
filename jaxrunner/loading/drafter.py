"""From the folder of an EAGLE-3 head to its config and weights."""

from pathlib import Path
from typing import Any

from jaxrunner.config import ModelConfig
from jaxrunner.hf_config import Settings, read_json
from jaxrunner.loading import checkpoint
from jaxrunner.loading.weights import load_params
from jaxrunner.models.eagle3 import eagle3
from jaxrunner.models.eagle3_config import Eagle3Config, read


def read_drafter(folder: Path, target: ModelConfig) -> Eagle3Config:
    """Returns the config of the head in a checkpoint folder, for `target`.

    Raises:
      FileNotFoundError, ValueError: a file is missing or broken, or the head is none for `target`.
    """
    path = folder / "config.json"
    return read(Settings(read_json(path), str(path)), target, checkpoint.names(folder))


def load_drafter(
    folder: Path, target: ModelConfig, *, dtype: str, sharding_or_device: Any = None
) -> tuple[Eagle3Config, Any]:
    """Returns config and weights of the head in a checkpoint folder; raises as `load_params`."""
    config = read_drafter(folder, target)
    params = load_params(
        folder, eagle3, config, dtype=dtype, sharding_or_device=sharding_or_device, progress=False
    )
    return config, params
