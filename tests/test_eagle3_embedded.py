"""The EAGLE-3 head in the package, and the record of its training."""

import functools
import hashlib
from pathlib import Path
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxrunner import embedded
from jaxrunner.hf_config import Settings, read_json
from jaxrunner.loading.weights import load_params
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.llama import llama
from jaxrunner.ops.backends import dense
from jaxrunner.speculators import eagle3_head as eagle3
from jaxrunner.train import acceptance as measure
from jaxrunner.train import eagle3_command
from jaxrunner.train import tokenizer as text
from jaxrunner.train.acceptance import Pair, acceptance, head_of, mean_length
from jaxrunner.types import Inputs
from tests.support.heads import load_drafter

FOLDER = embedded.EAGLE3_PATH
RECORD = read_json(FOLDER / "training.json")
EXCERPT = Path(__file__).parent / "data" / "held_out.txt"  # secrets.py of Python 3.12.1

SIZE = 32  # tokens of the longest sequence


@functools.cache
def shipped():
    target = llama.read(Settings(read_json(embedded.PATH / "config.json")))
    params = load_params(embedded.PATH, llama, target, dtype="float32", progress=False)
    head, drafter = load_drafter(FOLDER, target, dtype="float32")
    assert isinstance(target, DecoderConfig)
    return Pair(target, head), (params, drafter)


@pytest.fixture
def one_window(monkeypatch):
    """Measures one window at a time, and seven of padding less."""
    monkeypatch.setattr(measure, "EVAL_BATCH", 1)


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


@pytest.mark.slow
@pytest.mark.usefixtures("one_window")
def test_drafts_stand_as_often_as_stated():
    pair, params = shipped()
    bpe = Tokenizer.from_file(str(embedded.PATH / "tokenizer.json"))
    windows = text.stream(bpe, [EXCERPT.read_text()])[:512][None]
    stated = RECORD["held_out"]["greedy_mean_length_of_first_512_tokens"]["secrets.py"]
    greedy = acceptance(pair, params, windows)
    assert mean_length(greedy) == pytest.approx(stated, abs=0.01)
    assert (np.diff(greedy[0]) < 0).all()


@jax.jit
def run_target(tokens):
    """Returns the states that the head reads, [T, E] each, and what the target would give, [T]."""
    pair, (target, _) = shipped()
    names, caches = [f"residual.{i}" for i in pair.head.aux_layers], (None,) * 8
    x, given = llama.embed(pair.target, target, inputs_of(tokens)), inputs_of(tokens)
    hidden, _, found = llama.layers(
        pair.target, target, x, caches, given, dense(1), extras=tuple(names)
    )
    choice = jnp.argmax(llama.logits(pair.target, target, hidden), -1)
    return tuple(found[name] for name in names), choice


@jax.jit
def run_head(tokens, states):
    """Returns drafts, [T], behind tokens that follow the states, [T, E], and what is fed back."""
    pair, (target, head) = shipped()
    embeddings = target.embed[tokens]
    hidden, fed_back, _ = eagle3.layers(
        pair.head, head, embeddings, states, None, inputs_of(tokens), dense(1)
    )
    return jnp.argmax(head_of(target).product(hidden), -1), fed_back


def inputs_of(tokens) -> Inputs:
    place = jnp.arange(len(tokens), dtype=jnp.int32)
    return Inputs(tokens, place, jnp.full_like(place, len(tokens)))


def stood_behind(given: list[int], num_drafts: int) -> int:
    """Drafts as serving does, one token at a time, each from the whole sequence."""

    def padded(ids: list[int]):  # what comes later changes nothing, and one program serves all
        return jnp.asarray(ids + [0] * (SIZE - len(ids)), jnp.int32)

    pair, (_, head) = shipped()
    n, tokens = len(given), list(given)
    states = eagle3.feature(pair.head, head, run_target(padded(given))[0])
    for i in range(n - 1, n - 1 + num_drafts):
        choices, fed_back = run_head(padded(tokens[1:]), states)
        states = states.at[i].set(fed_back[i - 1])
        tokens.append(int(choices[i - 1]))
    choices = np.asarray(run_target(padded(tokens))[1])
    right = choices[n - 1 : n - 1 + num_drafts] == tokens[n:]
    return num_drafts if right.all() else int(np.argmin(right))


@pytest.mark.slow
@pytest.mark.usefixtures("one_window")
def test_acceptance_is_that_of_drafting_behind_each_token(monkeypatch):
    """With noise that is the same for all tokens of a place, sampled drafts are greedy ones."""
    monkeypatch.setattr(jax.random, "gumbel", lambda key, shape: jnp.zeros(shape))
    pair, params = shipped()
    bpe = Tokenizer.from_file(str(embedded.PATH / "tokenizer.json"))
    window = text.stream(bpe, [EXCERPT.read_text()])[400 : 400 + SIZE - 3]
    counts = [stood_behind(window[:end].tolist(), 3) for end in range(2, len(window) + 1)]
    want = [np.mean([count > i for count in counts]) for i in range(3)]
    assert want[0] > want[2] > 0
    got = acceptance(pair, params, window[None], temperature=0.7)[0]
    np.testing.assert_allclose(got, want)


def test_the_head_is_among_the_package_s_files():
    package = Path(embedded.__file__).parents[1]
    tools = tomllib.loads((package.parent / "pyproject.toml").read_text())["tool"]
    patterns = tools["setuptools"]["package-data"]["jaxrunner"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    assert set(FOLDER.iterdir()) <= packed
