"""Weights that are saved as they lie on the device come back the same."""

from pathlib import Path
import re
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.loading import sharded_state
from jaxrunner.loading.loader import load
from jaxrunner.loading.safetensors_file import read_header
from jaxrunner.models.llama import llama
from tests.support import tiny
from tests.support.small_llm import SIZES

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPT = {"prompt_token_ids": [5, 17, 300]}
equal = np.testing.assert_array_equal


def flip(path: Path) -> None:
    """Changes the last bit of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def llm():
    with LLM(str(embedded.PATH), skip_tokenizer_init=True, **SIZES) as llm:
        yield llm


def tokens(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def test_params_go_through_orbax_and_back(llm: LLM, tmp_path: Path):
    old, first = llm.params, tokens(llm)
    llm.save_params(tmp_path / "params")
    with ocp.StandardCheckpointer() as checkpointer:  # by those who know orbax alone
        layer = checkpointer.restore(tmp_path / "params")["layers"][1]
        equal(layer["qkv"]["weight"], old.layers[1].qkv.weight)
        checkpointer.save(tmp_path / "double", jax.tree.map(lambda x: 2 * x, old))
        checkpointer.save(tmp_path / "other", dict(embed=old.embed))
    llm.load_params(tmp_path / "double")
    assert tokens(llm) != first and llm.weights_version == 1
    llm.load_params(tmp_path / "params")
    jax.tree.map(equal, llm.params, old)
    words = r"other must hold the arrays of this model, \d+ differ: layers.0.attn_norm is missing"
    with pytest.raises(ValueError, match=words):
        llm.load_params(tmp_path / "other")
    with pytest.raises(ValueError, match="params is there already: name a new folder"):
        llm.save_params(tmp_path / "params")
    shutil.copytree(tmp_path / "params", tmp_path / "changed")
    flip(max((tmp_path / "changed").rglob("*"), key=lambda path: path.stat().st_size))
    with pytest.raises(ValueError, match="has changed since it was saved: copy or save"):
        llm.load_params(tmp_path / "changed")
    assert llm.weights_version == 2
    llm.sleep(level=2)
    with pytest.raises(RuntimeError, match="the weights sleep: wake_up first"):
        llm.save_params(tmp_path / "none")
    llm.wake_up()
    llm.load_params(tmp_path / "params")
    assert tokens(llm) == first


@pytest.mark.parametrize("pattern", [None, "part[{part}]-of-rank-{rank}.safetensors"])
def test_shards_hold_the_weights_as_they_are(llm: LLM, tmp_path: Path, pattern: str | None):
    most = 4 << 20
    llm.save_sharded_state(tmp_path, pattern, max_size=most)
    files = sorted(tmp_path.iterdir())
    name = (pattern or "model-rank-{rank}-part-{part}.safetensors").format(rank=0, part=0)
    assert len(files) > 2 and files[0].name == name
    sizes = [[x.dtype.itemsize * np.prod(x.shape) for x in read_header(f).values()] for f in files]
    assert all(sum(of_file) <= most or len(of_file) == 1 for of_file in sizes)
    with pytest.raises(ValueError, match=f"holds {re.escape(name)} already: name another folder"):
        llm.save_sharded_state(str(tmp_path), pattern)
    shutil.copy(embedded.PATH / "config.json", tmp_path)
    extra = {"pattern": pattern} if pattern else None
    loaded = load(
        str(tmp_path), tokenizer=None, dtype="float32", load_format="sharded_state",
        model_loader_extra_config=extra,
    )  # fmt: skip
    jax.tree.map(equal, loaded.read_params(progress=False), llm.params)
    flip(files[0])
    with pytest.raises(ValueError, match=r"has changed since it was saved: copy the file again"):
        loaded.read_params(progress=False)
    files[1].unlink()
    with pytest.raises(ValueError, match=r"the weights in .* is missing"):
        loaded.read_params(progress=False)


def test_an_llm_starts_from_shards(llm: LLM, tmp_path: Path):
    llm.save_sharded_state(tmp_path)
    shutil.copy(embedded.PATH / "config.json", tmp_path)
    with LLM(
        str(tmp_path), load_format="sharded_state", skip_tokenizer_init=True, **SIZES
    ) as other:
        assert tokens(other) == tokens(llm)
    words = "may have a 'pattern' with load_format='sharded_state', and nothing else, got"
    for load_format, extra in [("auto", {"pattern": "x"}), ("sharded_state", {"shard": 1})]:
        with pytest.raises(ValueError, match=words):
            load(str(tmp_path), tokenizer=None, load_format=load_format,
                 model_loader_extra_config=extra)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(pattern="a.safetensors"), ValueError, r"pattern must be a file's .*, got 'a\.safe"),
        (dict(pattern="a/{part}.safetensors"), ValueError, "pattern must be a file's name"),
        (dict(pattern="{part}.bin"), ValueError, "in it, ending in .safetensors, got '{part}.bin'"),
        (dict(pattern="{part}{x}.safetensors"), ValueError, "pattern must be a file's name"),
        (dict(pattern="{part.real}.safetensors"), ValueError, "pattern must be a file's name"),
        (dict(pattern="{part.x}.safetensors"), ValueError, "pattern must be a file's name"),
        (dict(pattern="\0{part}.safetensors"), ValueError, "pattern must be a file's name"),
        (dict(pattern=3), TypeError, "ending in .safetensors, got 3"),
        (dict(max_size=0), ValueError, "max_size=0 is out of range: take an integer from 1"),
        (dict(max_size="5GB"), TypeError, "max_size must be an integer from 1 to"),
    ],
)
def test_bad_arguments_write_nothing(arguments, error, words, tmp_path):
    with pytest.raises(error, match=words):
        sharded_state.save(tmp_path, *tiny.model_and_params(), **arguments)
    assert not list(tmp_path.iterdir())
    words = r"holds no model-rank-0-part-\*.safetensors: save_sharded_state writes them"
    with pytest.raises(FileNotFoundError, match=words):
        sharded_state.load(tmp_path, llama, tiny.config(), dtype="float32")
