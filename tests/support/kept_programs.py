"""Programs kept in a folder: an engine's, and those of a llama that another may draft for."""

from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import pytest

from jaxrunner import pytree
from jaxrunner.device import lowering
from jaxrunner.device.parts import parts
from jaxrunner.engine.engine import Engine
from jaxrunner.hf_config import Settings
from jaxrunner.models.llama import llama
from jaxrunner.programs import program_cache
from jaxrunner.programs.build import Built, build
from jaxrunner.sampling import RULES
from jaxrunner.speculators.draft_model import DraftModelConfig, draft_model
from jaxrunner.speculators.drafted import with_drafter
from jaxrunner.speculators.drafter import Drafted
from tests.outside import checkpoint
from tests.support import tiny

SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(architectures=["LlamaForCausalLM"])
CONFIG = llama.read(Settings(SETTINGS))


@pytest.fixture(autouse=True, scope="module")
def no_cache_of_jax():
    """What JAX loads from its own cache cannot be serialised once more."""
    folder = getattr(jax.config, program_cache.OWN[1])
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    lowering._lower.cache_clear()
    parts._first.cache_clear()
    jax.clear_caches()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)


def make(folder: Path | None, model=llama, rules=RULES, **changes) -> Engine:
    """Returns an engine of the tiny decoder whose programs are kept in `folder`."""
    config, params = tiny.model_and_params()
    sizes = tiny.engine_config(**changes)
    return Engine(model, config, sizes, params, rules=rules, cache_dir=folder)


def reasons(engine: Engine) -> set[str]:
    """Returns why an engine's programs were made."""
    return {compilation.reason for compilation in engine.runner.programs.ledger}


def built(folder: Any, model=llama, config: Any = CONFIG, params: Any = None, rules=RULES) -> Built:
    """Returns the programs of a model, kept in `folder`, by default of a llama without weights."""
    if params is None:
        params = pytree.abstract(model.params, config.dims | {"param": jnp.float32})
    return build(model, config, tiny.engine_config(), params, rules=rules, cache_dir=folder)


def drafted(folder: Any, target=llama, drafter=llama, family: Any = None, **changes: Any) -> Built:
    """Returns programs of a llama that another drafts for."""
    own = DraftModelConfig(drafter, CONFIG)
    K, method = changes.pop("num_drafts", 2), changes.pop("draft_sample_method", "coupled")
    model, config = with_drafter(
        target, CONFIG, family or draft_model(drafter), own, K, draft_sample_method=method
    )
    assert model.speculator is not None
    model = model._replace(speculator=model.speculator._replace(**changes))
    params = pytree.abstract(llama.params, CONFIG.dims | {"param": jnp.float32})
    return built(folder, model, config, Drafted(params, params))
