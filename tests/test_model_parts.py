"""A model runs in parts: embeddings, any run of layers, logits; and tells what is in between."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.models.llama import llama
from jaxrunner.ops.backends import dense
from jaxrunner.ops.plain import rms_norm
from jaxrunner.types import Inputs
from tests.support import families

IDS = families.ids(23)


def run(config: Any, params: Any, x: Any = None, **which: Any) -> Any:
    """Runs layers, all by default, over one sequence without a cache."""
    ids = jnp.asarray(IDS, jnp.int32)
    inputs = Inputs(ids, jnp.arange(ids.size), jnp.full(ids.size, ids.size))
    num = which.get("last", config.num_hidden_layers) - which.get("first", 0)
    x = llama.embed(config, params, inputs) if x is None else x
    return llama.layers(config, params, x, (None,) * num, inputs, dense(1), **which)


# Layers that differ, and angles of the length; in the others the weights alone are of other shapes.
@pytest.mark.parametrize(
    "variant", ["llama", "llama, dynamic rope", "mimo", "qwen2, some windows", "qwen3"]
)
def test_stages_of_layers_are_the_whole(variant):
    _, config, params = families.model_and_params(variant)
    whole, _, _ = run(config, params)
    for cut in range(1, config.num_hidden_layers):
        x, caches, _ = run(config, params, last=cut)
        assert len(caches) == cut
        staged, _, _ = run(config, params, x, first=cut)
        np.testing.assert_allclose(staged, whole, atol=1e-5)  # XLA fuses other operations


def test_extras_are_the_hidden_states_of_transformers():
    pytest.importorskip("torch", reason="the reference needs PyTorch: install the hf extra")
    pytest.importorskip("transformers", reason="the reference needs transformers")
    import torch

    from tests.support import huggingface

    variant = next(iter(families.VARIANTS))
    _, config, params = families.model_and_params(variant)
    names = tuple(f"residual.{i}" for i in range(config.num_hidden_layers))
    sum_ = f"residual.{config.num_hidden_layers}"
    hidden, _, extras = run(config, params, extras=(*names, sum_))
    last = rms_norm(extras[sum_], params.norm, config.rms_norm_eps)
    np.testing.assert_allclose(last, hidden, atol=1e-6)
    with torch.no_grad():
        out = huggingface.model(variant)(torch.tensor([IDS]), output_hidden_states=True)
    want = [state[0].numpy() for state in out.hidden_states]  # the last one is normed
    assert len(want) > 2 and len(set(names)) == len(want) - 1
    for got, expected in zip([*(extras[name] for name in names), hidden], want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_extras_of_other_layers_are_refused():
    _, config, params = families.model_and_params(next(iter(families.VARIANTS)))
    with pytest.raises(ValueError, match=r"extras \['residual.0'\] are none of these"):
        run(config, params, first=1, extras=("residual.0",))
