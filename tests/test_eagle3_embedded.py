"""The EAGLE-3 head in the package, and the record of its training."""

import functools
import hashlib
from pathlib import Path
import tomllib

import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxrunner import embedded
from jaxrunner.hf_config import Settings, read_json
from jaxrunner.loading.drafter import load_drafter
from jaxrunner.loading.weights import load_params
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.llama import llama
from jaxrunner.train import eagle3_command
from jaxrunner.train import tokenizer as text
from jaxrunner.train.acceptance import Pair, acceptance, mean_length

FOLDER = embedded.EAGLE3_PATH
RECORD = read_json(FOLDER / "training.json")
EXCERPT = Path(__file__).parent / "data" / "held_out.txt"  # secrets.py of Python 3.12.1


@functools.cache
def shipped():
    target = llama.read(Settings(read_json(embedded.PATH / "config.json")))
    params = load_params(embedded.PATH, llama, target, dtype="float32", progress=False)
    head, drafter = load_drafter(FOLDER, target, dtype="float32")
    assert isinstance(target, DecoderConfig)
    return Pair(target, head), (params, drafter)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_record_is_of_the_files_that_are_shipped():
    assert {path.name for path in FOLDER.iterdir()} == {*RECORD["sha256"], "training.json"}
    assert all(sha256(FOLDER / name) == digest for name, digest in RECORD["sha256"].items())
    assert RECORD["target_sha256"] == sha256(embedded.PATH / "model.safetensors")
    assert RECORD["best"]["length"] == max(entry["length"] for entry in RECORD["curve"])
    assert (FOLDER / "model.safetensors").stat().st_size < 8_000_000
    for measured, least in (("greedy", 2.5), ("temperature_0.7", 2.4)):
        found = RECORD["held_out"][measured]
        assert found["mean_length"] == pytest.approx(1 + sum(found["accepted"]), abs=1e-3)
        assert found["mean_length"] > least


def test_the_command_s_defaults_are_what_it_was_trained_with():
    (pair, _), given = shipped(), eagle3_command._arguments(["--out", "x"])
    stored = eagle3_command.settings(pair.target, given.layers) | {"torch_dtype": "bfloat16"}
    assert read_json(FOLDER / "config.json") == stored
    own = {name: getattr(given, name) for name in eagle3_command.OPTIONS}
    assert own | {"budget_s": 70.0} == {name: RECORD["training"][name] for name in own}
    assert given.rollouts * given.rows * given.row_len == RECORD["tokens_written"]


def test_drafts_stand_as_often_as_stated():
    pair, params = shipped()
    bpe = Tokenizer.from_file(str(embedded.PATH / "tokenizer.json"))
    windows = text.stream(bpe, [EXCERPT.read_text()])[:512][None]
    stated = RECORD["held_out"]["greedy_mean_length_of_first_512_tokens"]["secrets.py"]
    greedy = acceptance(pair, params, windows)
    assert mean_length(greedy) == pytest.approx(stated, abs=0.01)
    assert (np.diff(greedy[0]) < 0).all()


def test_the_head_is_among_the_package_s_files():
    package = Path(embedded.__file__).parents[1]
    tools = tomllib.loads((package.parent / "pyproject.toml").read_text())["tool"]
    patterns = tools["setuptools"]["package-data"]["jaxrunner"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert set(FOLDER.iterdir()) <= packed
