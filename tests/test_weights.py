"""Weights are read as they lie, and a checkpoint that lies is refused before it costs anything."""

import contextlib
import json
import math
import pickle
import tracemalloc
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import checkpoint, pytree, safetensors_file, weights
from jaxrunner.models.registry import read_model
from jaxrunner.settings import Settings, read_json

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
    if config.tie_word_embeddings:
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


def rename(old, new):
    return lambda t: {new if n == old else n: a for n, a in t.items()}


def replace(name, make):
    return lambda t: t | {name: make(t[name])}


LIES = {
    "missing": (lambda t: {n: a for n, a in t.items() if n != Q1}, rf"{Q1} \[60, 24\] is missing"),
    "missing and extra": (
        rename(Q1, "model.q"),
        rf"{Q1} .* is missing; model\.q \[60, 24\] in model\.safetensors is not wanted",
    ),
    "extra": (lambda t: t | {"more": t[Q1]}, r"got: more \[60, 24\] in model.* is not wanted"),
    "untied head missing": (
        lambda t: {n: a for n, a in t.items() if n != "lm_head.weight"},
        r"lm_head\.weight \[29, 24\] is missing",
    ),
    "transposed": (
        replace(Q1, lambda a: a.T.copy()),
        rf"{Q1} in model\.safetensors must be \[60, 24\], is \[24, 60\]",
    ),
    "another rank": (replace(Q1, lambda a: a[None]), r"must be \[60, 24\], is \[1, 60, 24\]"),
    "another size": (replace(Q1, lambda a: a[:-1]), r"must be \[60, 24\], is \[59, 24\]"),
    "float64": (replace(Q1, lambda a: a.astype(np.float64)), r"one of float32, .*, is float64"),
    "integers": (replace(Q1, lambda a: a.astype(np.int32)), r"one of float32, .*, is int32"),
    "float8": (
        replace(Q1, lambda a: a.astype(jnp.float8_e4m3fn)),
        rf"{Q1} in model\.safetensors must be one of .*, is float8_e4m3fn",
    ),
    "a layer too many": (
        lambda t: t | {n.replace(".1.", ".3."): a for n, a in t.items()},
        r"model\.layers\.3\..*; and 4 more",
    ),
}


@pytest.mark.parametrize(("lie", "match"), LIES.values(), ids=LIES.keys())
def test_a_lying_checkpoint_is_refused_before_anything_is_allocated(
    tmp_path, monkeypatch, lie, match
):
    model, config, _ = tiny()
    write(tmp_path / checkpoint.WHOLE, lie(split(model, config, random_params(model, config))))
    monkeypatch.setattr(weights.np, "memmap", None)
    monkeypatch.setattr(weights.jax, "device_put", None)
    with pytest.raises(ValueError, match=match):
        load(tmp_path, model, config)


def in_shard(lie):
    """Applies a lie to the index or the folder of a sharded checkpoint."""

    def apply(folder, index, tensors):
        lie(folder, index, tensors)
        (folder / checkpoint.INDEX).write_text(json.dumps(dict(weight_map=index)))

    return apply


def move(folder, index, tensors):
    index[Q1] = "model-00001-of-00003.safetensors"


def twice(folder, index, tensors):
    write(folder / index[Q1], {n: tensors[n] for n in tensors if index[n] == index[Q1]})
    other = next(s for s in index.values() if s != index[Q1])
    write(folder / other, {n: tensors[n] for n in tensors if index[n] == other or n == Q1})


SHARD_LIES = {
    "shard missing": (
        lambda folder, index, t: (folder / index[Q1]).unlink(),
        FileNotFoundError,
        r"names 3 shards, 1 of them missing: model-0000\d-of-00003\.safetensors",
    ),
    "tensor in another shard": (move, ValueError, rf"{Q1} is in model-0000[23].* says model-00001"),
    "tensor nowhere": (
        lambda folder, index, t: index.update(more="model-00001-of-00003.safetensors"),
        ValueError,
        r"more is not in model-00001-of-00003\.safetensors, where .*index\.json says it is",
    ),
    "tensor not in the index": (
        lambda folder, index, t: index.pop(Q1),
        ValueError,
        rf"{Q1} is in model-.*, but not in model\.safetensors\.index\.json",
    ),
    "tensor twice": (twice, ValueError, rf"{Q1} is in model-.* and again in model-"),
    "shard elsewhere": (
        lambda folder, index, t: index.update({Q1: "../other.safetensors"}),
        ValueError,
        rf"{Q1} must lie in a \*\.safetensors file of the same folder, got '\.\./other",
    ),
    "shard a pickle": (
        lambda folder, index, t: index.update({Q1: "pytorch_model.bin"}),
        ValueError,
        r"got 'pytorch_model\.bin'",
    ),
    "shard a number": (
        lambda folder, index, t: index.update({Q1: 7}),
        ValueError,
        r"same folder, got 7",
    ),
    "index empty": (
        lambda folder, index, t: index.clear(),
        ValueError,
        r"weight_map must name the shard of each tensor, got \{\}",
    ),
}


@pytest.mark.parametrize(("lie", "error", "match"), SHARD_LIES.values(), ids=SHARD_LIES.keys())
def test_lying_shards_are_refused(tmp_path, lie, error, match):
    model, config, _ = tiny()
    tensors = split(model, config, random_params(model, config))
    in_shard(lie)(tmp_path, write_shards(tmp_path, tensors), tensors)
    with pytest.raises(error, match=match):
        load(tmp_path, model, config)


ONE = dict(dtype="F32", shape=[2], data_offsets=[0, 8])
BROKEN = {
    "empty": (b"", r"x\.safetensors must be a whole safetensors file, got 0 bytes"),
    "header cut": ((99).to_bytes(8, "little") + b"{", r"must be a whole safetensors file"),
    "header huge": ((1 << 60).to_bytes(8, "little") + b"{}", r"whole safetensors file"),
    "header no JSON": ((4).to_bytes(8, "little") + b"{no}", r"whole safetensors file"),
    "zip": (b"PK\x03\x04" + bytes(60), r"x\.safetensors is a pickle or zip file"),
    "pickle": (pickle.dumps([1, 2], protocol=2) + bytes(60), r"is a pickle or zip file"),
}


@pytest.mark.parametrize(("data", "match"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_refused(tmp_path, data, match):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=match):
        safetensors_file.read_header(path)


HEADERS = {
    "twice": (
        json.dumps(dict(a=ONE, b=ONE)).replace('"b"', '"a"'),
        r"its header says: key 'a' appears twice",
    ),
    "unknown dtype": (dict(a=ONE | dict(dtype="F6_E2M3")), r"a: dtype must be one of .*F6_E2M3"),
    "past the end": (
        dict(a=ONE | dict(data_offsets=[1, 9])),
        r"x\.safetensors: a must lie in bytes \d+ to \d+ of its file, got",
    ),
    "backwards": (dict(a=ONE | dict(data_offsets=[8, 0])), r"a must lie in bytes"),
    "too small": (
        dict(a=ONE | dict(shape=[3])),
        r"a must be 12 bytes for float32\[3\], got 8: download it again",
    ),
    "too large": (dict(a=ONE | dict(shape=[])), r"a must be 4 bytes for float32\[\], got 8"),
}


@pytest.mark.parametrize("theirs", [True, False], ids=["with safetensors", "by ourselves"])
@pytest.mark.parametrize(("header", "match"), HEADERS.values(), ids=HEADERS.keys())
def test_a_lying_header_is_refused(tmp_path, monkeypatch, header, match, theirs):
    path = tmp_path / "x.safetensors"
    write_raw(path, header, bytes(8))
    if not theirs:
        monkeypatch.setattr(safetensors_file, "safe_open", contextlib.nullcontext)
    with pytest.raises(ValueError, match=r"x\.safetensors" if theirs else match):
        safetensors_file.read_header(path)


def test_a_key_that_appears_twice_is_seen_although_safetensors_does_not(tmp_path):
    path = tmp_path / "x.safetensors"
    write_raw(path, HEADERS["twice"][0], bytes(8))
    with pytest.raises(ValueError, match="key 'a' appears twice"):
        safetensors_file.read_header(path)


def test_a_header_of_640_bytes_is_no_pickle(tmp_path):
    path = tmp_path / "x.safetensors"
    write_raw(path, json.dumps(dict(a=ONE)).ljust(640), bytes(8))
    assert path.read_bytes().startswith(b"\x80\x02")
    assert list(safetensors_file.read_header(path)) == ["a"]


@pytest.mark.parametrize("keep", [0.999, 0.5, 0.01])
def test_a_truncated_checkpoint_is_refused(tmp_path, keep):
    model, config, values = tiny()
    weights.save_checkpoint(tmp_path, model, config, random_params(model, config), values)
    path = tmp_path / checkpoint.WHOLE
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(ValueError, match=r"model\.safetensors must be a whole safetensors file"):
        load(tmp_path, model, config)


@pytest.mark.parametrize("suffix", checkpoint.PICKLE_SUFFIXES)
def test_pickles_are_refused_by_name(tmp_path, suffix):
    model, config, _ = tiny()
    (tmp_path / f"pytorch_model{suffix}").write_bytes(b"")
    match = rf"as pytorch_model\{suffix}: that is a pickle, and unpickling can run any code"
    with pytest.raises(ValueError, match=match):
        load(tmp_path, model, config)


def test_a_torch_archive_under_another_name_is_refused(tmp_path):
    model, config, _ = tiny()
    with zipfile.ZipFile(tmp_path / checkpoint.WHOLE, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    with pytest.raises(ValueError, match=r"unpickling can run any code: get the model as real"):
        load(tmp_path, model, config)


def test_a_folder_without_weights_says_so(tmp_path):
    model, config, _ = tiny()
    with pytest.raises(FileNotFoundError, match=r"holds no weights: it needs model\.safetensors"):
        load(tmp_path, model, config)
    with pytest.raises(FileNotFoundError, match=r"gone must be a folder that holds"):
        load(tmp_path / "gone", model, config)
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(FileNotFoundError, match=r"a\.safetensors is missing: download"):
        load(tmp_path, model, config)
    (tmp_path / "b.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"2 safetensors files, a\.safetensors .* no model"):
        load(tmp_path, model, config)


@dtypes
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_named_when_asked(tmp_path, dtype, value):
    model, config, values = tiny()
    tensors = split(model, config, random_params(model, config, dtype))
    tensors[Q1][3, 4] = value
    write(tmp_path / checkpoint.WHOLE, tensors)
    load(tmp_path, model, config, dtype)
    with pytest.raises(ValueError, match=rf"{Q1} holds 1 of 1440 values that are NaN or infinite"):
        load(tmp_path, model, config, dtype, check_nan=True)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_values_too_large_for_float16_are_refused(tmp_path, stored):
    model, config, values = tiny()
    tensors = split(model, config, random_params(model, config, stored))
    tensors[Q1][3, 4] = 7e4
    write(tmp_path / checkpoint.WHOLE, tensors)
    with pytest.raises(ValueError, match=rf"{Q1} holds values over 65504"):
        load(tmp_path, model, config, "float16")


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


@variants
@dtypes
def test_random_params_have_the_declared_shapes_and_depend_on_the_seed(variant, dtype):
    model, config, _ = tiny(*variant)
    params = weights.random_params(model, config, dtype, 3)
    pytree.check(params, config.dims | {"param": dtype})
    assert_same(weights.random_params(model, config, dtype, 3), params)
    other = weights.random_params(model, config, dtype, 4)
    assert bool(jnp.all(params.norm == 1))
    assert not bool(jnp.any(params.layers[0].down == other.layers[0].down).all())
    assert not bool(jnp.all(params.layers[0].down == params.layers[1].down))
    assert 0.015 < float(jnp.std(params.layers[0].gate_up.astype(jnp.float32))) < 0.025


def test_random_params_are_traced_once_a_shape(monkeypatch):
    model, config, _ = tiny("Llama", dict(num_hidden_layers=5, hidden_size=26))
    normal, shapes = jax.random.normal, []
    monkeypatch.setattr(
        weights.jax.random, "normal", lambda k, s, d: shapes.append(s) or normal(k, s, d)
    )
    weights.random_params(model, config, "float32", 0)
    assert len(shapes) == len(set(shapes)) == 5  # embedding and head are of one shape
