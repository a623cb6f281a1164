"""From `speculative_config` to a model that drafts."""

from dataclasses import replace
from pathlib import Path

from jaxrunner.api.speculative_config import SpeculativeConfig
from jaxrunner.api.synthetic_acceptance import conditional_rates
from jaxrunner.caches.interleave import interleave_of
from jaxrunner.config import ModelConfig
from jaxrunner.hf_config import Settings, read_json
from jaxrunner.loading import checkpoint
from jaxrunner.loading.declared import abstract_params
from jaxrunner.loading.loader import Loaded
from jaxrunner.loading.quantized import read_quantized
from jaxrunner.parallel.drafter import shard_drafter
from jaxrunner.parallel.mesh import mesh_of
from jaxrunner.parallel.pipeline import check_drafts
from jaxrunner.quantization.quantized_config import plain_config
from jaxrunner.speculators import mimo_mtp
from jaxrunner.speculators.draft_model import DraftModelConfig, draft_model
from jaxrunner.speculators.drafted import with_drafter
from jaxrunner.speculators.drafter import Drafter, DrafterConfig
from jaxrunner.speculators.eagle import eagle
from jaxrunner.speculators.eagle3 import eagle3
from jaxrunner.speculators.ngram import ngram
from jaxrunner.speculators.speculator import Speculator
from jaxrunner.speculators.suffix import suffix

MTP = {"MiMoForCausalLM": (mimo_mtp.mimo_mtp, mimo_mtp.read)}  # by the model's architecture
WITHOUT_WEIGHTS = "ngram", "suffix"
HEADS = {"eagle": eagle, "eagle3": eagle3}


def with_speculator(loaded: Loaded, config: SpeculativeConfig) -> Loaded:
    """Returns a loaded model with what drafts for it; its weights are still to be read.

    Raises:
      FileNotFoundError, ValueError: the drafter's checkpoint is bad, or not for this model.
    """
    by_layers = not isinstance(config.method, Speculator) and config.method not in WITHOUT_WEIGHTS
    check_drafts(loaded.config, by_layers=by_layers, adaptive=config.is_adaptive)
    drafting = _with_speculator(loaded, config)
    speculator, rejection = drafting.model.speculator, config.rejection_sample_method
    rates = conditional_rates(config) if rejection == "synthetic" else ()
    assert speculator is not None
    if isinstance(config.method, str) or rejection != "exact":  # else a user's says it itself
        speculator = speculator._replace(rejection=rejection, rates=rates)
    if config.is_adaptive:
        speculator = speculator._replace(adaptive=True)
    return drafting._replace(model=drafting.model._replace(speculator=speculator))


def _with_speculator(loaded: Loaded, config: SpeculativeConfig) -> Loaded:
    method, K = config.method, config.num_drafts
    if isinstance(method, Speculator):
        return loaded._replace(model=loaded.model._replace(speculator=method))
    if method == "ngram":
        low, high = config.prompt_lookup_min or 1, config.prompt_lookup_max or 1
        speculator = ngram(K, min_n=low, max_n=high)
        return loaded._replace(model=loaded.model._replace(speculator=speculator))
    if method == "suffix":
        return loaded._replace(model=loaded.model._replace(speculator=_suffix(config, K)))
    if not isinstance(method, str | Drafter):
        raise TypeError(
            "speculative_config.method must be a name, a jaxrunner.speculators.speculator."
            f"Speculator or a jaxrunner.speculators.drafter.Drafter, got {type(method).__name__}"
        )
    weights, is_dummy = loaded.load_config, loaded.load_config.load_format == "dummy"
    mesh, target = mesh_of(loaded.config), getattr(loaded.config, "whole", loaded.config)
    if method == "mtp":
        family, drafter = read_mtp(target)
    else:
        assert config.model is not None
        weights = replace(weights, model=config.model, revision=None)
        folder = weights.folder(name="speculative_config.model")
        family, drafter = read_drafter(method, folder, target, has_weights=not is_dummy)
    if mesh is not None:
        family, drafter = shard_drafter(
            family, drafter, mesh, interleave_of(loaded.config),
            expert_parallel=getattr(loaded.config, "expert_parallel", False),
        )  # fmt: skip
    if not is_dummy:
        weights = replace(weights, load_format="auto", model_loader_extra_config=None)
    weights.check(family, drafter)
    model, both = with_drafter(
        loaded.model, loaded.config, family, drafter, K, draft_sample_method=config.drafts
    )
    params = abstract_params(model, both, loaded.dtype)
    load_config = replace(loaded.load_config, drafter=weights)
    return loaded._replace(model=model, config=both, params=params, load_config=load_config)


def _suffix(config: SpeculativeConfig, num_drafts: int) -> Speculator:
    names = dict(
        max_depth="max_tree_depth", num_cached="max_cached_tokens", max_factor="max_spec_factor",
        min_share="min_token_prob",
    )  # fmt: skip
    sizes = {name: getattr(config, f"suffix_decoding_{key}") for name, key in names.items()}
    return suffix(num_drafts, **sizes)


def read_mtp(target: ModelConfig) -> tuple[Drafter, DrafterConfig]:
    """Returns what a model's own checkpoint drafts with.

    Raises:
      ValueError: it has nothing that drafts.
    """
    if (name := target.architecture) not in MTP:
        raise ValueError(
            f"speculative_config.method='mtp' wants a checkpoint with layers that draft, as of "
            f"{', '.join(MTP)}, got {name}: take 'ngram' or 'eagle3'"
        )
    family, read = MTP[name]
    return family, read(plain_config(target))


def read_drafter(
    method: str | Drafter, folder: Path, target: ModelConfig, *, has_weights: bool = True
) -> tuple[Drafter, DrafterConfig]:
    """Returns the family and the config of a drafter's checkpoint; raises as `with_speculator`."""
    path = folder / "config.json"
    values = read_json(path)
    settings = Settings(values, str(path))
    family = HEADS.get(method) if isinstance(method, str) else method
    if family is not None:
        if family.read is None:
            raise ValueError(
                f"{family.name} has no read, which makes its config of {path}: give the Drafter one"
            )
        names = checkpoint.names(folder) if has_weights else frozenset()
        return family, family.read(settings, target, names)
    model, config = read_quantized(values, str(path))
    if config.vocab_size != target.vocab_size:
        raise ValueError(
            f"{path}: vocab_size of a draft model must be the target's, {target.vocab_size}, got "
            f"{config.vocab_size}: take a model with the same tokenizer"
        )
    return draft_model(model), DraftModelConfig(model, config)
