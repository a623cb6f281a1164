"""A checkpoint that lies is refused by name, before it costs anything."""

import contextlib
import json
import math
import pickle
import time
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.loading import checkpoint, safetensors_file, weights
from tests.support.checkpoints import (
    Q1,
    dtypes,
    load,
    random_params,
    split,
    tiny,
    write,
    write_raw,
    write_shards,
)


def rename(old, new):
    return lambda t: {new if n == old else n: a for n, a in t.items()}


def replace(name, make):
    return lambda t: t | {name: make(t[name])}


LIES = {
    "missing": (
        lambda t: {n: a for n, a in t.items() if n != Q1},
        rf"{Q1} \[60, 24\] is missing\. Download the checkpoint again, or correct config\.json",
    ),
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
    monkeypatch.setattr(safetensors_file, "read", None)
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
        lambda folder, index, t: index.update({"x" * 9999: "../other.safetensors"}),
        ValueError,
        r"json: x{200} must lie in a \*\.safetensors file of the same folder, got '\.\./other",
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
        monkeypatch.setattr(safetensors_file, "safe_open", lambda *_: contextlib.nullcontext())
    with pytest.raises(ValueError, match=r"x\.safetensors" if theirs else match):
        safetensors_file.read_header(path)


def test_a_key_that_appears_twice_is_seen_although_safetensors_does_not(tmp_path):
    path = tmp_path / "x.safetensors"
    write_raw(path, HEADERS["twice"][0], bytes(8))
    with pytest.raises(ValueError, match="key 'a' appears twice"):
        safetensors_file.read_header(path)


def test_a_large_header_is_refused_at_once(tmp_path):
    none = json.dumps(dict(dtype="F32", shape=[0], data_offsets=[0, 0]))
    entries = ", ".join(f'"tensor.{i % 59_999}": {none}' for i in range(60_000))
    path, start = tmp_path / "x.safetensors", time.thread_time()
    write_raw(path, "{" + entries + "}")
    with pytest.raises(ValueError, match=r"key 'tensor\.0' appears twice"):
        safetensors_file.read_header(path)
    assert time.thread_time() - start < 4
    path.write_bytes((2**25 + 1).to_bytes(8, "little") + b"{" + bytes(2**25))
    with pytest.raises(ValueError, match="has a header of 33554433 bytes, at most 32 MiB can"):
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
    with pytest.raises(FileNotFoundError, match=r"gone must be a folder that holds .* or "):
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
    model, config, _ = tiny()
    tensors = split(model, config, random_params(model, config, dtype))
    tensors[Q1][3, 4] = value
    write(tmp_path / checkpoint.WHOLE, tensors)
    load(tmp_path, model, config, dtype)
    with pytest.raises(ValueError, match=rf"{Q1} holds 1 of 1440 values that are NaN or infinite"):
        load(tmp_path, model, config, dtype, check_nan=True)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_values_too_large_for_float16_are_refused(tmp_path, stored):
    model, config, _ = tiny()
    tensors = split(model, config, random_params(model, config, stored))
    tensors[Q1][3, 4] = 7e4
    write(tmp_path / checkpoint.WHOLE, tensors)
    with pytest.raises(ValueError, match=rf"{Q1} holds values over 65504"):
        load(tmp_path, model, config, "float16")


def test_a_stored_infinity_is_not_taken_for_a_value_too_large(tmp_path):
    model, config, _ = tiny()
    tensors = split(model, config, random_params(model, config))
    tensors[Q1][3, 4] = math.inf
    write(tmp_path / checkpoint.WHOLE, tensors)
    got = split(model, config, load(tmp_path, model, config, "float16"))
    assert got[Q1][3, 4] == math.inf
