"""Tensors of trainers are taken as they are, or refused by name."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrunner import LLM
from jaxrunner.loading import tensors
from tests.support.checkpoints import NEEDS_TORCH
from tests.support.small_llm import SIZES

NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def llm(shallow):
    sizes: dict[str, Any] = SIZES | dict(dtype="bfloat16")
    with LLM(shallow, skip_tokenizer_init=True, **sizes) as llm:
        yield llm


def update(llm: LLM, weights: Any) -> None:
    llm.start_weight_update()
    llm.update_weights(weights)
    llm.finish_weight_update()


def reload(llm: LLM, weights: Any) -> None:
    llm.reload_weights(weights)


ways = pytest.mark.parametrize("way", [update, reload])


def kinds(value: np.ndarray) -> dict[str, Any]:
    """Returns tensors that all hold these values."""
    made: dict[str, Any] = {
        "numpy, float64": value.astype(np.float64),
        "numpy, bfloat16": value.astype(ml_dtypes.bfloat16),
        "not contiguous": np.stack([value, value], -1)[..., 0],
        "JAX, float16": jnp.asarray(value, jnp.float16),
    }
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    plain = torch.from_numpy(value)
    made["torch, float32"] = plain
    made["torch, bfloat16"] = plain.bfloat16()
    made["torch, float16, transposed"] = plain.half().t().contiguous().t()
    made["torch, requires gradients"] = plain.clone().requires_grad_()
    made["torch, a bfloat16 parameter"] = torch.nn.Parameter(plain.bfloat16())
    made["torch, of a graph"] = made["torch, requires gradients"] * 1
    return made


@ways
def test_tensors_of_all_libraries_and_dtypes_are_taken(way, llm: LLM):
    shape = llm.params.layers[1].down.weight.shape
    rng = np.random.default_rng(0)
    for kind in kinds(np.zeros((1, 1), np.float32)):
        value = rng.integers(-8, 8, shape).astype(np.float32)  # that all dtypes hold
        way(llm, {DOWN: kinds(value)[kind]})
        got = np.asarray(llm.params.layers[1].down.weight, np.float32)
        np.testing.assert_array_equal(got, value, kind)


@ways
@pytest.mark.parametrize("form", [dict, lambda x: list(x.items()), lambda x: iter(x.items())])
def test_pairs_and_dicts_are_taken(way, form, llm: LLM):
    value = np.full(llm.params.norm.shape, 3.0 if way is update else 5.0, np.float32)
    way(llm, form({NORM: value}))
    np.testing.assert_array_equal(np.asarray(llm.params.norm, np.float32), value)


def test_what_its_owner_writes_later_changes_nothing(llm: LLM):
    buffer = np.full(llm.params.norm.shape, 2.0, np.float32)
    llm.start_weight_update()
    llm.update_weights({NORM: buffer})
    buffer[:] = 9
    llm.finish_weight_update()
    assert np.asarray(llm.params.norm, np.float32).max() == 2


BAD = {
    "no pairs": (7, TypeError, "must be a dict from names in a checkpoint to arrays, or pairs"),
    "a triple": ([(NORM, 1.0, 2)], TypeError, "must be a dict .* of them, got among them"),
    "a name of no text": ([(3, 1.0)], TypeError, "or pairs of them, got among them"),
    "twice": ([(NORM, np.ones(8))] * 2, ValueError, f"names '{NORM}' twice: give each tensor once"),
    "an object": ({NORM: object()}, TypeError, f"{NORM} must be an array of float32, .* object"),
    "a text": ({NORM: "ones"}, TypeError, f"{NORM} must be an array of float32"),
    "none": ({NORM: None}, TypeError, f"{NORM} must be an array of float32, .* object of None"),
    "ragged": ({NORM: [[1.0], [2.0, 3.0]]}, TypeError, f"{NORM} cannot be read as an array: "),
    "integers": ({NORM: np.ones(8, np.int32)}, TypeError, f"{NORM} must be an array of .* int32"),
    "false torch": (
        {NORM: SimpleNamespace(detach=lambda: SimpleNamespace(cpu=lambda: [].clear))},
        TypeError,
        f"{NORM} cannot be read as an array",
    ),
}


@ways
@pytest.mark.parametrize(("weights", "error", "match"), BAD.values(), ids=BAD.keys())
def test_what_is_no_tensor_is_refused_and_nothing_changes(way, weights, error, match, llm: LLM):
    before, version = llm.params, llm.weights_version
    with pytest.raises(error, match=match):
        way(llm, weights)
    assert llm.params is before and llm.weights_version == version
    with pytest.raises(RuntimeError, match="no weight update has begun"):
        llm.finish_weight_update()


def test_a_reload_of_nothing_is_refused(llm: LLM):
    for nothing in ([], {}, iter(())):
        with pytest.raises(ValueError, match="source has no tensor: name a folder, or give at"):
            llm.reload_weights(nothing)


@ways
def test_values_that_are_not_finite_are_refused_where_asked(way, llm: LLM):
    value = np.ones(llm.params.norm.shape, np.float32)
    value[3] = np.nan
    way(llm, {NORM: value})  # as the checkpoint's own would be
    way(llm, {NORM: np.nan_to_num(value)})
    worker, unchecked = llm.engine.worker, llm.load_config
    worker.load_config = replace(unchecked, check_nan=True)
    try:
        with pytest.raises(ValueError, match=rf"{NORM} holds 1 of \d+ values that are NaN or inf"):
            way(llm, {NORM: value})
        broken = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.inf), llm.params)
        with pytest.raises(ValueError, match=r"params.*embed holds values that are NaN or infini"):
            llm.update_params(broken)
        llm.update_params(llm.params)
    finally:
        worker.load_config = unchecked


def test_reading_needs_no_torch(monkeypatch):
    monkeypatch.setitem(tensors.sys.modules, "torch", None)
    assert tensors.read("weights", {"a": np.ones(3)})["a"].sum() == 3
