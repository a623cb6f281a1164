"""Kernels that may run at once: those that must not, as they wait, depend on one another."""

from collections.abc import Callable
from dataclasses import replace
import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal
import jax.numpy as jnp
import pytest

from jaxrunner.hf_config import Settings
from jaxrunner.models.registry import read_model
from jaxrunner.ops.backends import dense
from jaxrunner.types import Inputs
from tests.support import dense_families, families, hybrids, mixtures, tiny
from tests.support.checkpoints import NEEDS_TORCH

NUM_TOKENS = 6
MODULES = families, dense_families, hybrids, mixtures
CASES = [(module, name) for module in MODULES for name in module.VARIANTS]
KINDS = "mlp", "experts", "attend", "rotate_attend", "attend_latent"


def settings(module: Any, variant: str) -> dict[str, Any]:
    """Returns the keys of a variant's `config.json`."""
    if module is not mixtures:
        return module.settings(variant)
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    family, changes = mixtures.VARIANTS[variant]
    made = getattr(transformers, mixtures.CONFIGS.get(family, f"{family}Config"))
    return made(**mixtures.BASE | changes).to_dict() | dict(architectures=[f"{family}ForCausalLM"])


@pytest.mark.parametrize(("module", "variant"), CASES, ids=[name for _, name in CASES])
def test_what_waits_depends_on_what_waits_before(module: Any, variant: str):
    model, config = read_model(Settings(settings(module, variant)))
    if getattr(config, "concurrent_kernels", None) is False:
        pytest.skip("its kernels run one after the other")
    params = tiny.random_params(config, params=model.params)
    positions = jnp.arange(NUM_TOKENS, dtype=jnp.int32)
    inputs, num = Inputs(positions + 3, positions, jnp.zeros(NUM_TOKENS, jnp.int32)), 0

    def noted(run: Callable[..., Any], x: jax.Array, *args: Any, **how: Any) -> Any:
        nonlocal num
        if how.get("beside_experts"):  # it does not wait
            return run(x, *args, **how)
        nth, num = num, num + 1
        out = run(checkpoint_name(x, f"given {nth}"), *args, **how)
        return jax.tree.map(lambda y: checkpoint_name(y, f"made {nth}"), out)

    ops = dense(1)
    ops = replace(ops, **{k: functools.partial(noted, getattr(ops, k)) for k in KINDS})

    def run(x: jax.Array) -> jax.Array:
        none = (None,) * len(config.cache_kinds)
        return model.layers(config, params, x, none, inputs, ops)[0]

    with jax.disable_jit():  # so that layers are no programs of their own
        jaxpr = jax.make_jaxpr(run)(model.embed(config, params, inputs))
    found = calls_before(jaxpr)
    assert found == {n: {*range(n)} for n in range(num)}
    assert num


def calls_before(jaxpr: Any) -> dict[int, set[int]]:
    """Returns by call which calls' results it depends on."""
    depends: dict[Any, set[int]] = {}
    found: dict[int, set[int]] = {}
    for eqn in jaxpr.eqns:
        variables = [v for v in eqn.invars if not isinstance(v, Literal)]
        of = set[int]().union(*(depends.get(v, set()) for v in variables))
        what, _, nth = eqn.params.get("name", "").partition(" ")
        if what == "given":
            found[int(nth)] = of
        elif what == "made":
            of = {*of, int(nth)}
        depends |= dict.fromkeys(eqn.outvars, of)
    return found
