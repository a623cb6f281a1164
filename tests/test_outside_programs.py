"""What a program compiles of others' code is never kept among our own executables."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from jaxrunner import pytree
from jaxrunner.caches.full import FullAttention
from jaxrunner.hf_config import Settings
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.llama import llama
from jaxrunner.sampling import RULES
from jaxrunner.sampling.custom import with_logits_fn
from jaxrunner.speculators.draft_model import draft_model
from tests.outside.int8_linear import int8_llama
from tests.outside.lookup import lookup
from tests.outside.recurrent import recurrent
from tests.outside.scaled_tokens import TABLE
from tests.outside.top_n_sigma import top_n_sigma
from tests.support.kept_programs import CONFIG, SETTINGS, built, drafted


@dataclass(frozen=True)
class OtherConfig(DecoderConfig):
    """One that could say anything."""


@dataclass(frozen=True)
class OtherKind(FullAttention):
    """One that could keep anything."""


@dataclass(frozen=True)
class KindConfig:
    """Ours but for the kind of cache; it passes for ours by its module."""

    __module__ = DecoderConfig.__module__
    config: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)

    @property
    def cache_kinds(self) -> tuple[OtherKind, ...]:
        return (OtherKind(),) * self.config.num_hidden_layers


class Pair(NamedTuple):
    """Weights in a container of one's own, which computes nothing."""

    first: Any
    second: Any


def test_our_own_is_kept(tmp_path):
    assert built(tmp_path).is_ours


@pytest.mark.parametrize("name", ["table", "config", "kind", "rule", "params"])
def test_a_llama_with_one_thing_of_others_is_not_kept(tmp_path, name):
    given: dict[str, dict[str, Any]] = dict(
        table=dict(model=llama._replace(tables=(TABLE,))),
        config=dict(config=OtherConfig(**vars(CONFIG))),
        kind=dict(config=KindConfig(CONFIG)),
        rule=dict(rules=with_logits_fn(RULES, top_n_sigma)),
        params=dict(
            params=pytree.abstract(
                int8_llama.params, int8_llama.read(Settings(SETTINGS)).dims | {"param": jnp.float32}
            )
        ),
    )
    other = built(tmp_path, **given[name])
    assert not other.is_ours and other.cache is None and other.task is None


@pytest.mark.parametrize("model", [recurrent, int8_llama], ids=["recurrent", "int8"])
def test_families_of_others_are_not_kept(tmp_path, model):
    other = built(tmp_path, model, model.read(Settings(SETTINGS)))
    assert not other.is_ours and other.cache is None


def test_containers_of_weights_count_as_well(tmp_path):
    ours = pytree.abstract(llama.params, CONFIG.dims | {"param": jnp.float32})
    assert built(tmp_path, params=[ours, (ours, {"a": ours}), None]).is_ours
    assert not built(tmp_path, params={"a": [Pair(ours, ours)]}).is_ours


def layers(*args: Any, **kwargs: Any) -> Any:
    """Llama's, by code of others."""
    return llama.layers(*args, **kwargs)


OTHERS = llama._replace(layers=layers)


@pytest.mark.parametrize(
    "given",
    [
        dict(target=OTHERS),
        dict(drafter=OTHERS),
        dict(family=draft_model(llama)._replace(layers=layers)),
        dict(tables=lookup.tables),
    ],
    ids=["target", "drafter", "family", "tables"],
)
def test_a_drafter_hides_no_code_of_others(tmp_path, given: dict[str, Any]):
    assert drafted(tmp_path).is_ours and not drafted(tmp_path, **given).is_ours
    assert not built(tmp_path, llama._replace(speculator=lookup)).is_ours
