"""From a model's name to all that an engine needs of it: config, weights, tokenizer, defaults."""

from dataclasses import dataclass, field
import logging
from pathlib import Path
from typing import Any, NamedTuple

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.api.validation import shown, validate
from jaxrunner.config import ModelConfig, read_token_ids
from jaxrunner.hf_config import Settings, read_json
from jaxrunner.loading import checkpoint, llm_arguments, sharded_state
from jaxrunner.loading.declared import abstract_params
from jaxrunner.loading.dtypes import choose_dtype
from jaxrunner.loading.hub import resolve
from jaxrunner.loading.quantized import read_quantized
from jaxrunner.loading.weights import check_checkpoint, load_params, random_params
from jaxrunner.mixtures.recorded_routes import with_recorded_routes
from jaxrunner.model import Model, Stored, StoredConfig
from jaxrunner.parallel.parallel_config import ParallelConfig
from jaxrunner.pooling.params import PoolerConfig
from jaxrunner.pooling.reading import PoolingFiles, read_pooling
from jaxrunner.speculators.drafter import Drafted, DraftedConfig
from jaxrunner.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ONE_DEVICE = ParallelConfig()
LOAD_FORMATS = ("auto", "dummy", "sharded_state")
GENERATION_CONFIGS = ("auto", "vllm")


@dataclass(frozen=True)
class LoadConfig:
    """The source of weights, and how they are read.

    Raises:
      TypeError, ValueError: a field that cannot be; names it.
    """

    model: str | Path  # a folder, or a name on the hub
    revision: str | None = None
    load_format: str = "auto"
    model_loader_extra_config: dict[str, Any] | None = None
    check_nan: bool = False
    seed: int = 0  # of random weights
    download_dir: str | Path | None = None  # where what the hub has is kept
    hf_token: str | bool | None = field(default=None, repr=False)
    drafter: "LoadConfig | None" = None  # of what drafts for the model

    def __post_init__(self):
        for name, value in vars(self).items():
            if name != "drafter":
                validate(name, value, llm_arguments.MODEL[name])
        _check_one_of("load_format", self.load_format, LOAD_FORMATS)
        allowed = {"pattern"} if self.load_format == "sharded_state" else set()
        if set(self.model_loader_extra_config or ()) - allowed:
            raise ValueError(
                "model_loader_extra_config may have a 'pattern' with load_format='sharded_state', "
                f"and nothing else, got {shown(self.model_loader_extra_config)} with "
                f"{self.load_format!r}"
            )

    def folder(self, **other: Any) -> Path:
        """Returns the folder of the model, or of what `other` names; raises as `hub.resolve`."""
        asked: dict[str, Any] = dict(model=self.model, revision=self.revision) | other
        return resolve(**asked, cache_dir=self.download_dir, token=self.hf_token)

    def check(self, model: Stored, config: StoredConfig) -> None:
        """Checks that the weights are there and like the model, without reading them.

        Raises:
          FileNotFoundError, ValueError: they are not.
        """
        if self.load_format == "auto":
            check_checkpoint(self.folder(), model, config)
        elif self.load_format == "sharded_state":
            extra = self.model_loader_extra_config or {}
            sharded_state.check(self.folder(), model, config, **extra)

    def read(
        self, model: Stored, config: StoredConfig, *, dtype: str, progress: bool = True
    ) -> Any:
        """Returns the weights, on their device.

        Raises:
          FileNotFoundError, ValueError: they are not like the model.
        """
        if isinstance(config, DraftedConfig) and self.drafter is not None:
            two = (self, config.model, config.target), (self.drafter, config.family, config.drafter)
            return Drafted(*(of.read(m, c, dtype=dtype, progress=progress) for of, m, c in two))
        if self.load_format == "dummy":
            return random_params(model, config, dtype, self.seed)
        read = load_params if self.load_format == "auto" else sharded_state.load
        return read(
            self.folder(), model, config, dtype=dtype,
            check_nan=self.check_nan, progress=progress, **self.model_loader_extra_config or {},
        )  # fmt: skip


class Loaded(NamedTuple):
    """A model, ready for an engine but for its weights."""

    model: Model
    config: ModelConfig
    params: Any  # shapes, dtypes and shardings, until they are read
    dtype: str
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    default_params: SamplingParams
    load_config: LoadConfig

    def read_params(self, *, progress: bool = True) -> Any:
        """Returns the weights, on their device; raises as `LoadConfig.read`."""
        return self.load_config.read(self.model, self.config, dtype=self.dtype, progress=progress)


def load(
    name: str | Path,
    *,
    tokenizer: str | Path | Tokenizer | None = None,
    tokenizer_revision: str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    seed: int = 0,
    load_format: str = "auto",
    model_loader_extra_config: dict[str, Any] | None = None,
    hf_overrides: dict[str, Any] | None = None,
    quantization: str | None = None,
    generation_config: str = "auto",
    check_nan: bool = False,
    download_dir: str | Path | None = None, hf_token: str | bool | None = None,
    parallel: ParallelConfig = ONE_DEVICE,
    enable_return_routed_experts: bool = False,
    runner: str = "auto", pooler_config: Any = None,
) -> Loaded:  # fmt: skip
    """Loads a checkpoint folder, or a name on the hub, but for its weights.

    tokenizer: None for none; its revision is the model's where it is the model's own and none is
        named. seed: of random weights. download_dir, hf_token: of what comes from the hub.
    quantization: what `quantization.registry.read_method` takes.
    parallel: over which devices the model is cut. enable_return_routed_experts: keeps its routes.
    runner, pooler_config: of `read_pooling`.

    Raises:
      FileNotFoundError, ValueError: the checkpoint or an argument is bad; names it.
    """
    _check_one_of("generation_config", generation_config, GENERATION_CONFIGS)
    load_config = LoadConfig(
        name, revision, load_format, model_loader_extra_config, check_nan, seed,
        download_dir, hf_token,
    )  # fmt: skip
    folder = load_config.folder()
    settings = read_json(folder / "config.json") | _checked_overrides(hf_overrides)
    asked = PoolerConfig.read(pooler_config)
    pooling = read_pooling(runner, settings, folder, asked, checkpoint.shapes)
    model, config = _read_model(
        pooling, settings, folder, quantization, parallel, enable_return_routed_experts
    )
    dtype = choose_dtype(dtype, config.dtype)
    tokenizer = _read_tokenizer(tokenizer, tokenizer_revision, load_config, folder)
    eos_token_ids, defaults = _generation_defaults(folder, generation_config, config)
    load_config.check(model, config)  # before anything is compiled for it
    params = abstract_params(model, config, dtype)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos_token_ids |= {tokenizer.eos_token_id}
    return Loaded(model, config, params, dtype, tokenizer, eos_token_ids, defaults, load_config)


def _read_tokenizer(
    tokenizer: str | Path | Tokenizer | None, revision: str | None, load: LoadConfig, folder: Path
) -> Tokenizer | None:
    """Returns the tokenizer that is named, which may be in the folder of the model."""
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    if tokenizer != load.model or revision is not None:
        folder = load.folder(model=tokenizer, revision=revision, name="tokenizer")
    return Tokenizer.from_folder(folder)


def _read_model(
    pooling: PoolingFiles | None, settings: dict[str, Any], folder: Path,
    quantization: str | None, parallel: ParallelConfig, with_routes: bool,
) -> tuple[Model, ModelConfig]:  # fmt: skip
    """Returns the family and the config that config.json and the devices ask for."""
    settings = settings if pooling is None else pooling.settings
    model, config = read_quantized(settings, str(folder / "config.json"), quantization)
    model, config = with_recorded_routes(model, config) if with_routes else (model, config)
    model, config = parallel.cut(model, config)
    return (model, config) if pooling is None else pooling.made(model, config)


def _check_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def _checked_overrides(overrides: Any) -> dict[str, Any]:
    if overrides is None:
        return {}
    if not isinstance(overrides, dict) or not all(isinstance(key, str) for key in overrides):
        raise TypeError(
            f"hf_overrides must be a dict of config.json's keys, None to remove one, got "
            f"{shown(overrides)}"
        )
    return overrides


def _generation_defaults(
    folder: Path, mode: str, config: ModelConfig
) -> tuple[frozenset[int], SamplingParams]:
    """Reads the checkpoint's default sampling parameters, and logs them once."""
    path = folder / "generation_config.json"
    if mode != "auto" or not path.is_file():
        return frozenset(config.eos_token_ids), SamplingParams()
    settings = Settings(read_json(path), str(path))
    eos = read_token_ids(settings, "eos_token_id") or config.eos_token_ids
    kinds = dict(temperature=float, top_k=int, top_p=float, min_p=float, max_new_tokens=int)
    kinds |= dict(repetition_penalty=float)
    values = {key: settings.take(key, kind, None) for key, kind in kinds.items()}
    values["max_tokens"] = values.pop("max_new_tokens")
    if settings.take("do_sample", bool, True) is False:
        values |= dict(temperature=0.0, top_k=None, top_p=None, min_p=None)
    given = {key: value for key, value in values.items() if value is not None}
    if given:
        logger.warning("Default sampling parameters, from %s: %s", path, given)
    try:
        return frozenset(eos), SamplingParams(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{path} has defaults that cannot be, {error}: correct it, or pass "
            "generation_config='vllm'"
        ) from error
