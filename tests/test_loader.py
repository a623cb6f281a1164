"""What a checkpoint folder says beside its weights: defaults, EOS ids, dtype."""

import json
import logging
import shutil

import jax
import pytest

from jaxrunner import SamplingParams, embedded
from jaxrunner.hf_config import read_json
from jaxrunner.loading.loader import load
from tests.support.checkpoints import TINY


@pytest.fixture
def checkpoint(tmp_path):
    """Returns a function that loads a one-layer dummy with these generation defaults."""
    config = read_json(embedded.PATH / "config.json") | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def make(generation=None, **arguments):
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        arguments = {"tokenizer": None, "load_format": "dummy"} | arguments
        return load(str(tmp_path), **arguments)

    return make


def test_sampling_defaults_are_the_checkpoints(checkpoint, caplog):
    given = dict(do_sample=True, temperature=0.6, top_k=20, top_p=0.9, max_new_tokens=7,
                 repetition_penalty=1.1)  # fmt: skip
    with caplog.at_level(logging.WARNING):
        loaded = checkpoint(given)
    want = SamplingParams(
        temperature=0.6, top_k=20, top_p=0.9, max_tokens=7, repetition_penalty=1.1
    )
    assert loaded.default_params == want
    said = [r.message for r in caplog.records if "Default sampling parameters" in r.message]
    assert len(said) == 1 and "'temperature': 0.6" in said[0]
    assert checkpoint(given, generation_config="vllm").default_params == SamplingParams()


def test_a_checkpoint_that_does_not_sample_is_greedy(checkpoint):
    assert checkpoint(dict(do_sample=False, temperature=0.6)).default_params.is_greedy
    assert checkpoint({}).default_params == SamplingParams()


def test_eos_ids_come_from_all_who_name_them(checkpoint):
    assert checkpoint().eos_token_ids == {0}
    assert checkpoint(dict(eos_token_id=[5, 6])).eos_token_ids == {5, 6}
    assert checkpoint(dict(eos_token_id=5), generation_config="vllm").eos_token_ids == {0}
    with_tokenizer = checkpoint(dict(eos_token_id=7), tokenizer=str(embedded.PATH))
    assert with_tokenizer.eos_token_ids == {0, 7}


@pytest.mark.parametrize(
    ("backend", "asked", "stored", "want", "words"),
    [
        ("gpu", "auto", "bfloat16", "bfloat16", ""),
        ("gpu", "float16", "bfloat16", "float16", ""),
        ("cpu", "auto", "bfloat16", "float32", "dtype='auto' is float32 on a CPU"),
        ("cpu", "auto", "float32", "float32", ""),
        ("cpu", "float32", "bfloat16", "float32", ""),
        ("cpu", "bfloat16", "bfloat16", "bfloat16", "dtype='bfloat16' was asked for: on a CPU"),
    ],
)
def test_a_dtype_is_the_checkpoints_or_what_the_device_is_fast_in(
    checkpoint, monkeypatch, caplog, backend, asked, stored, want, words
):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    loaded = checkpoint(dtype=asked, hf_overrides={"torch_dtype": stored})
    assert loaded.dtype == want and loaded.params.embed.dtype == want
    said = [record.message for record in caplog.records if "CPU" in record.message]
    assert len(said) == bool(words) and all(words in line for line in said)


BAD_DEFAULTS = {
    "a wild temperature": (
        dict(temperature=-1.0),
        r"generation_config\.json has defaults that can",
    ),
    "a huge value": (
        dict(temperature={"a": "b" * 20_000}),
        r"'temperature' must be float, got .{,99}$",
    ),
    "no ids": (dict(eos_token_id=[[3]]), r"eos_token_id must be ids from 0 to \d+, got \[3\]"),
}


@pytest.mark.parametrize(("given", "match"), BAD_DEFAULTS.values(), ids=BAD_DEFAULTS.keys())
def test_defaults_that_cannot_be_are_named_with_their_file(given, match, checkpoint):
    with pytest.raises(ValueError, match=match):
        checkpoint(given)


def test_weights_unlike_the_config_are_refused_before_they_are_read(checkpoint, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no weights: it needs"):
        checkpoint(load_format="auto")
    with pytest.raises(FileNotFoundError, match=r"holds no model-rank-0-part-\*.safetensors"):
        checkpoint(load_format="sharded_state")
    shutil.copy(embedded.PATH / "model.safetensors", tmp_path)
    with pytest.raises(ValueError, match=r"must be those of its config.json.* is not wanted"):
        checkpoint(load_format="auto")


def test_overrides_are_a_dict_of_keys(checkpoint):
    for bad in ([1], "tie_word_embeddings", {1: 2}):
        with pytest.raises(TypeError, match=r"hf_overrides must be a dict of config\.json's"):
            checkpoint(hf_overrides=bad)


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a checkpoint folder must hold config.json"):
        load(str(tmp_path), tokenizer=None)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        load(str(tmp_path), tokenizer=None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json must be JSON, got"):
        load(str(tmp_path), tokenizer=None)


FILES = {
    "broken": (b"{no", r"config\.json must be JSON, got"),
    "no text": (b"\xff\xfe{", r"config\.json must be JSON, got"),
    "no object": (b"[1]", r"config\.json must hold a JSON object, got list"),
    "nested without end": (b'{"a":' * 99_999, r"config\.json must be JSON, got"),
    "a number without end": (b'{"a": ' + b"9" * 9999 + b"}", r"config\.json must be JSON, got"),
    "large": (b" " * (2**26 + 1), r"must be at most 64 MiB, got 67108865 bytes: it is none of a"),
}


@pytest.mark.parametrize(("data", "match"), FILES.values(), ids=FILES.keys())
def test_a_broken_config_file_is_named(tmp_path, data, match):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ValueError, match=match):
        read_json(tmp_path / "config.json")


def test_a_missing_config_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing: a checkpoint folder"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert read_json(tmp_path / "config.json") == TINY
