"""Weights are read as they lie, rounded once, and held on the host one at a time."""

import pickle
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from jaxrunner import pytree
from jaxrunner.hf_config import Settings, read_json
from jaxrunner.loading import checkpoint, safetensors_file, weights
from jaxrunner.models.registry import read_model
from tests.support.checkpoints import (
    NEEDS_TORCH,
    Q1,
    TINY,
    assert_same,
    dtypes,
    load,
    random_params,
    split,
    tiny,
    variants,
    write,
    write_shards,
)


@variants
@dtypes
def test_a_saved_checkpoint_loads_equal(tmp_path, variant, dtype):
    model, config, values = tiny(*variant)
    params = random_params(model, config, dtype)
    weights.save_checkpoint(tmp_path, model, config, params, values)
    read_again, config_again = read_model(Settings(read_json(tmp_path / "config.json")))
    assert (read_again, config_again.dtype) == (model, dtype)
    assert_same(load(tmp_path, model, config_again, dtype), params)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", "np") as file:  # asked for by old transformers
        assert file.metadata()["format"] == "pt"


@variants
def test_we_read_what_transformers_saves(tmp_path, variant):
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    torch.manual_seed(0)
    config = getattr(transformers, f"{variant[0]}Config")(**TINY | variant[1])
    hf = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in hf.parameters():  # norms and biases too: ones and zeros hide a mix-up
            weight.normal_()
    hf.save_pretrained(tmp_path, max_shard_size="9KB")
    assert (tmp_path / checkpoint.INDEX).is_file()
    model, config = read_model(Settings(read_json(tmp_path / "config.json")))
    got = split(model, config, load(tmp_path, model, config))
    want = {n: t.numpy() for n, t in hf.state_dict().items()}
    if not config.dims["untied"]:
        want.pop("lm_head.weight")
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], name)


@variants
def test_transformers_reads_what_we_save(tmp_path, variant):
    torch = pytest.importorskip("torch", reason=NEEDS_TORCH)
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    model, config, values = tiny(*variant)
    params = random_params(model, config, "bfloat16")
    values["model_type"] = variant[0].lower()
    weights.save_checkpoint(tmp_path, model, config, params, values)
    hf, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", output_loading_info=True
    )
    assert hf.dtype == torch.bfloat16
    assert not info["missing_keys"] and not info["unexpected_keys"]
    got = {n: t.float().numpy() for n, t in hf.state_dict().items()}
    for name, want in split(model, config, params).items():
        np.testing.assert_array_equal(got[name], want.astype(np.float32), name)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@dtypes
def test_weights_are_rounded_once_to_the_wanted_dtype(tmp_path, stored, dtype):
    model, config, values = tiny()
    params = random_params(model, config, stored)
    weights.save_checkpoint(tmp_path, model, config, params, values)
    want = jax.tree.map(lambda x: x.astype(dtype), params)
    assert_same(load(tmp_path, model, config, dtype), want)


def test_parts_of_one_weight_may_have_different_dtypes(tmp_path):
    model, config, _ = tiny()
    tensors = split(model, config, random_params(model, config, "bfloat16"))
    tensors[Q1] = tensors[Q1].astype(np.float16)
    write(tmp_path / checkpoint.WHOLE, tensors)
    got = split(model, config, load(tmp_path, model, config))
    for name, want in tensors.items():
        np.testing.assert_array_equal(got[name], want.astype(np.float32), name)


def test_shards_load_as_one_file(tmp_path):
    model, config, _ = tiny()
    params = random_params(model, config)
    write_shards(tmp_path, split(model, config, params))
    assert_same(load(tmp_path, model, config), params)


def test_a_single_file_of_any_name_loads(tmp_path):
    model, config, _ = tiny()
    params = random_params(model, config)
    write(tmp_path / "pytorch.safetensors", split(model, config, params))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps("not read"))
    assert_same(load(tmp_path, model, config), params)


def test_tensors_may_lie_at_any_byte(tmp_path):
    model, config, _ = tiny()
    params = random_params(model, config)
    path = tmp_path / checkpoint.WHOLE
    write(path, split(model, config, params))
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    path.write_bytes(
        (size + 3).to_bytes(8, "little") + data[8 : 8 + size] + b"   " + data[8 + size :]
    )
    assert_same(load(tmp_path, model, config), params)


def test_buffers_of_old_and_a_tied_head_are_passed_over(tmp_path):
    model, config, _ = tiny("Qwen2", dict(tie_word_embeddings=True))
    params = random_params(model, config)
    tensors = split(model, config, params)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(5, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write(tmp_path / checkpoint.WHOLE, tensors)
    assert_same(load(tmp_path, model, config), params)


def test_weights_go_to_the_device_asked_for(tmp_path):
    model, config, values = tiny()
    weights.save_checkpoint(tmp_path, model, config, random_params(model, config), values)
    device = jax.devices()[-1]
    params = load(tmp_path, model, config, sharding_or_device=device)
    assert {d for leaf in jax.tree.leaves(params) for d in leaf.devices()} == {device}


def test_loaded_weights_outlive_a_change_of_the_file(tmp_path):
    model, config, values = tiny()
    params = random_params(model, config)
    weights.save_checkpoint(tmp_path, model, config, params, values)
    loaded = load(tmp_path, model, config)
    with (tmp_path / checkpoint.WHOLE).open("r+b") as file:
        file.write(bytes((tmp_path / checkpoint.WHOLE).stat().st_size))
    assert_same(loaded, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_host_never_holds_more_than_a_few_weights(tmp_path, monkeypatch, dtype):
    sizes = dict(hidden_size=120, intermediate_size=300, num_hidden_layers=12)
    model, config, values = tiny("Llama", sizes)
    params = random_params(model, config)
    weights.save_checkpoint(tmp_path, model, config, params, values)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
    # A device whose memory is not the host's.
    monkeypatch.setattr(weights.jax, "device_put", lambda x, where: np.zeros(0))
    load(tmp_path, model, config, dtype)  # imports and caches
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    load(tmp_path, model, config, dtype)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - before < 3 * largest < total / 4


def test_the_progress_bar_counts_tensors_and_can_be_off(tmp_path, capsys):
    model, config, values = tiny()
    weights.save_checkpoint(tmp_path, model, config, random_params(model, config), values)
    weights.load_params(tmp_path, model, config, dtype="float32", progress=False)
    assert capsys.readouterr().err == ""
    weights.load_params(tmp_path, model, config, dtype="float32")
    assert "30/30" in capsys.readouterr().err


def test_a_dtype_that_we_do_not_compute_in_is_refused(tmp_path):
    model, config, _ = tiny()
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got 'auto'"):
        load(tmp_path, model, config, "auto")


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a: dtype must be one of .*, got complex64"):
        write(tmp_path / "x.safetensors", dict(a=np.zeros(3, np.complex64)))
    assert not list(tmp_path.iterdir())


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    def arrays():
        yield np.zeros(3, np.float32)
        raise KeyboardInterrupt

    path = tmp_path / "x.safetensors"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        safetensors_file.write(path, dict.fromkeys("ab", (np.float32, (3,))), arrays())
    assert path.read_bytes() == b"before"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_random_params_are_of_every_dtype(dtype):
    model, config, _ = tiny()
    pytree.check(weights.random_params(model, config, dtype, 3), config.dims | {"param": dtype})


@variants
def test_random_params_have_the_declared_shapes_and_depend_on_the_seed(variant):
    model, config, _ = tiny(*variant)
    params = weights.random_params(model, config, "float32", 3)
    pytree.check(params, config.dims | {"param": jnp.float32})
    assert_same(weights.random_params(model, config, "float32", 3), params)
    other = weights.random_params(model, config, "float32", 4)
    assert bool(jnp.all(params.norm == 1))
    assert not bool(jnp.all(params.layers[0].down.weight == other.layers[0].down.weight))
    assert not bool(jnp.all(params.layers[0].down.weight == params.layers[1].down.weight))
    assert 0.015 < float(jnp.std(params.layers[0].gate_up.weight)) < 0.025


def test_random_params_are_traced_once_a_shape(monkeypatch):
    model, config, _ = tiny("Llama", dict(num_hidden_layers=5, hidden_size=26))
    normal, shapes = jax.random.normal, []
    monkeypatch.setattr(
        weights.jax.random, "normal", lambda k, s, d: shapes.append(s) or normal(k, s, d)
    )
    weights.random_params(model, config, "float32", 0)
    assert len(shapes) == len(set(shapes)) == 5  # embedding and head are of one shape
