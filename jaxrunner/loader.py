"""From a model's name to all that an engine needs of it: config, weights, tokenizer, defaults."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

from jaxrunner import sharded_state
from jaxrunner.bounds import shown
from jaxrunner.config import ModelConfig, check_dtype
from jaxrunner.hub import resolve
from jaxrunner.model import Model
from jaxrunner.models.registry import read_model
from jaxrunner.params import SamplingParams
from jaxrunner.settings import Settings, read_json
from jaxrunner.tokenizer import Tokenizer
from jaxrunner.weights import load_params, random_params

logger = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "dummy", "sharded_state")
GENERATION_CONFIGS = ("auto", "vllm")


class Loaded(NamedTuple):
    """A model, ready for an engine."""

    model: Model
    config: ModelConfig
    params: Any
    dtype: str
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    default_params: SamplingParams


def load(
    name: str,
    *,
    tokenizer: str | Tokenizer | None,
    revision: str | None = None,
    dtype: str = "auto",
    seed: int = 0,
    load_format: str = "auto",
    model_loader_extra_config: dict[str, Any] | None = None,
    hf_overrides: dict[str, Any] | None = None,
    generation_config: str = "auto",
    check_nan: bool = False,
    progress: bool = True,
) -> Loaded:
    """Loads a checkpoint folder, or a name on the hub. `tokenizer` None loads none.

    Raises:
      FileNotFoundError, ValueError: the checkpoint or an argument is bad; names it.
    """
    for field, value, allowed in (
        ("load_format", load_format, LOAD_FORMATS),
        ("generation_config", generation_config, GENERATION_CONFIGS),
    ):
        if value not in allowed:
            raise ValueError(f"{field} must be one of {allowed}, got {value!r}")
    extra = model_loader_extra_config or {}
    if extra.keys() - ({"pattern"} if load_format == "sharded_state" else set()):
        raise ValueError(
            "model_loader_extra_config may have a 'pattern' with load_format='sharded_state', "
            f"and nothing else, got {shown(extra)} with {load_format!r}"
        )
    folder = resolve(name, revision=revision)
    settings = read_json(folder / "config.json") | (hf_overrides or {})
    model, config = read_model(Settings(settings, str(folder / "config.json")))
    dtype = config.dtype if dtype == "auto" else check_dtype("dtype", dtype)
    if isinstance(tokenizer, str):
        same = tokenizer == name
        tokenizer = Tokenizer.from_folder(folder if same else resolve(tokenizer))
    if load_format == "dummy":
        params = random_params(model, config, dtype, seed)
    else:
        read = load_params if load_format == "auto" else sharded_state.load
        params = read(
            folder, model, config, dtype=dtype, check_nan=check_nan, progress=progress, **extra
        )
    eos_token_ids, defaults = _generation_defaults(folder, generation_config, config)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos_token_ids |= {tokenizer.eos_token_id}
    return Loaded(model, config, params, dtype, tokenizer, eos_token_ids, defaults)


def _generation_defaults(
    folder: Path, mode: str, config: ModelConfig
) -> tuple[frozenset[int], SamplingParams]:
    """Reads what a checkpoint's authors sample with, and says so once."""
    path = folder / "generation_config.json"
    if mode != "auto" or not path.is_file():
        return frozenset(config.eos_token_ids), SamplingParams()
    settings = Settings(read_json(path), str(path))
    eos = settings.take("eos_token_id", (int, list), list(config.eos_token_ids))
    kinds = dict(temperature=float, top_k=int, top_p=float, min_p=float, max_new_tokens=int)
    kinds |= dict(repetition_penalty=float)
    values = {key: settings.take(key, kind, None) for key, kind in kinds.items()}
    values["max_tokens"] = values.pop("max_new_tokens")
    if settings.take("do_sample", bool, True) is False:
        values |= dict(temperature=0.0, top_k=None, top_p=None, min_p=None)
    given = {key: value for key, value in values.items() if value is not None}
    if given:
        logger.warning("Default sampling parameters, from %s: %s", path, given)
    return frozenset(eos if isinstance(eos, list) else [eos]), SamplingParams(**given)
