"""Experts that transformers 5 stacks are those of published checkpoints, in every family."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrunner.loading import checkpoint
from jaxrunner.loading.declared import wanted_tensors
from jaxrunner.loading.loader import load
from jaxrunner.loading.stacked_experts import unstacked

pytest.importorskip("torch", reason="the reference needs PyTorch: install the hf extra")
pytest.importorskip("transformers", reason="the reference needs transformers")

# Each has other names of experts or of what chooses them.
VARIANTS = ("qwen2", "mixtral", "granite", "deepseek v3", "gpt-oss")


def leaves(folder: Path) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(load(folder).read_params(progress=False))]


def save(variant: str, folder: Path) -> tuple[Any, Path, Path]:
    """Returns a model, and its folders as published ones are and as transformers holds it."""
    from tests.support import mixtures

    model, published, stacked = mixtures.model(variant), folder / "published", folder / "stacked"
    model.save_pretrained(published)
    model.save_pretrained(stacked, save_original_format=False)
    return model, published, stacked


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_the_same_whichever_way_a_checkpoint_names_them(variant: str, tmp_path: Path):
    model, published, stacked = save(variant, tmp_path)
    names = [set(load_file(folder / checkpoint.WHOLE)) for folder in (published, stacked)]
    assert (names[0] != names[1]) == (variant != "gpt-oss")
    want = leaves(published)
    for got, leaf in zip(leaves(stacked), want, strict=True):
        np.testing.assert_array_equal(got, leaf)
    # So are tensors that a trainer gives by the names of its parameters.
    loaded = load(published)
    wanted = wanted_tensors(loaded.model, loaded.config)
    state = {name: x.detach().numpy() for name, x in model.state_dict().items()}
    given = unstacked(state, wanted)
    assert wanted.keys() <= given.keys()
    on_file = load_file(published / checkpoint.WHOLE)
    for name in wanted:
        np.testing.assert_array_equal(given[name], on_file[name])


def test_stacks_that_cannot_be_are_refused_by_name(tmp_path: Path):
    _, published, stacked = save("mixtral", tmp_path)
    path, name = stacked / checkpoint.WHOLE, "model.layers.1.mlp.experts.gate_up_proj"
    tensors = load_file(path)
    own = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    for other, match in {
        "turned": rf"{own} in model.safetensors must be \[44, 36\], is \[18, 88\]",
        "few": "experts.5.w1.weight .* is missing",
        "twice": rf"{own} is in model.safetensors and again in model.safetensors",
    }.items():
        changed = dict(tensors)
        if other == "twice":
            changed[own] = load_file(published / checkpoint.WHOLE)[own]
        else:
            x = tensors[name]
            changed[name] = np.swapaxes(x, 1, 2).copy() if other == "turned" else x[:5].copy()
        save_file(changed, str(path), metadata=dict(format="pt"))
        with pytest.raises(ValueError, match=match):
            load(stacked).read_params(progress=False)
