"""Tiny checkpoints of every family, true ones and false ones."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.hf_config import Settings
from jaxrunner.loading import checkpoint, safetensors_file, weights
from jaxrunner.models.registry import read_model

NEEDS_TORCH = "writes checkpoints with transformers: pip install 'jaxrunner[hf]'"
TINY = dict(
    vocab_size=29,
    hidden_size=24,
    intermediate_size=22,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10,
    max_position_embeddings=64,
    hidden_act="silu",
    tie_word_embeddings=False,
)
VARIANTS = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama, biased": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("Mistral", dict(sliding_window=7)),
    "qwen2": ("Qwen2", {}),
    "qwen2, tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", {}),
    "qwen3, biased": ("Qwen3", dict(attention_bias=True)),
}
variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
Q1 = "model.layers.1.self_attn.q_proj.weight"  # [60, 24]


def settings_of(family, changes):
    return TINY | changes | dict(architectures=[f"{family}ForCausalLM"], dtype="float32")


def tiny(family="Llama", changes=None):
    values = settings_of(family, changes or {})
    return *read_model(Settings(values)), values


def random_params(model, config, dtype="float32", seed=0):
    """Unlike the package's, no two values of it are likely to be equal."""
    rng = np.random.default_rng(seed)
    tree = pytree.abstract(model.params, config.dims | {"param": dtype})
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape).astype(a.dtype)), tree)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype, path
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w), str(path))


def split(model, config, params):
    """Returns the tensors of a checkpoint by name."""
    sources = jax.tree.leaves(model.sources(config), is_leaf=lambda x: hasattr(x, "split"))
    pairs = zip(sources, jax.tree.leaves(params), strict=True)
    return {n: t for s, p in pairs for n, t in zip(s.names, s.split(np.asarray(p)), strict=True)}


def write(path, tensors):
    safetensors_file.write(
        path, {n: (t.dtype, t.shape) for n, t in tensors.items()}, tensors.values()
    )


def write_raw(path, header, data=b""):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_shards(folder, tensors, num_shards=3):
    """Writes every third tensor to one shard, and returns the index."""
    names = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    for i, name in enumerate(names):
        write(folder / name, {n: tensors[n] for n in list(tensors)[i::num_shards]})
    index = {n: names[i % num_shards] for i, n in enumerate(tensors)}
    (folder / checkpoint.INDEX).write_text(json.dumps(dict(metadata={}, weight_map=index)))
    return index


def load(folder, model, config, dtype="float32", **kwargs):
    return weights.load_params(folder, model, config, dtype=dtype, progress=False, **kwargs)
