"""EAGLE-3 heads as their checkpoints are read."""

from pathlib import Path

from jaxrunner.config import ModelConfig
from jaxrunner.loading.speculation import read_drafter
from jaxrunner.loading.weights import load_params
from jaxrunner.speculators.eagle3_config import Eagle3Config
from jaxrunner.speculators.eagle3_head import Params


def load_drafter(folder: Path, target: ModelConfig, *, dtype: str) -> tuple[Eagle3Config, Params]:
    """Returns config and weights of the head in a checkpoint folder."""
    family, config = read_drafter("eagle3", folder, target)
    assert isinstance(config, Eagle3Config)
    return config, load_params(folder, family, config, dtype=dtype, progress=False)
