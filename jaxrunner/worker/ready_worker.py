"""The worker of weights that are there, with sizes that are settled: nothing to load or to plan."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.loading.loader import LoadConfig
from jaxrunner.model import Model
from jaxrunner.rule import Rule
from jaxrunner.runner.build import build
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.sampling import RULES
from jaxrunner.worker.lifecycle import Lifecycle


class ReadyWorker(Lifecycle):
    """A runner for our own scheduler; the weights stay their owner's."""

    def __init__(
        self,
        model: Model,
        model_config: ModelConfig,
        config: EngineConfig,
        params: Any,
        *,
        rules: tuple[Rule, ...] = RULES,
        cache_dir: Path | None = None,
    ):
        """params: the weights, or what stands for those to come; see `ModelRunner`."""
        super().__init__()
        self.load_config = LoadConfig("")  # of no checkpoint, unless `update_config` names one
        # Arrays of the host would be copied to the device in every step.
        params = jax.tree.map(
            lambda x: jax.device_put(x) if isinstance(x, np.ndarray) else x, params
        )
        built = build(model, model_config, config, params, rules=rules, cache_dir=cache_dir)
        self._runner = ModelRunner(built, params, trusted=True)

    @property
    def runner(self) -> ModelRunner:
        """What holds weights and caches."""
        return self._runner
