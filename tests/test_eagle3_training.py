"""The trainer of EAGLE-3 heads: its attention, its measure, its data, and that it learns."""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.hf_config import Settings
from jaxrunner.loading.weights import save_checkpoint
from jaxrunner.models.llama import llama
from jaxrunner.ops.backends import dense
from jaxrunner.speculators import eagle3_head as eagle3
from jaxrunner.speculators.eagle3_config import read
from jaxrunner.train import __main__, acceptance, corpus, eagle3_command, rollout
from jaxrunner.train import eagle3 as training
from jaxrunner.train import tokenizer as text
from jaxrunner.train.rollout import rollouts, rows_of
from jaxrunner.types import Inputs
from tests.support import tiny
from tests.support.heads import load_drafter

TARGET = tiny.config(num_hidden_layers=5, tie_word_embeddings=True)
B, L = 2, 9
TRAIN = training.HeadTraining(
    steps=60, batch=4, length=16, warmup=5, eval_every=30, peak_rate=1e-2, weight_decay=0.0
)
CODE = "def add(a, b):\n    '''Add.'''\n    return a + b\n\n\nclass Box:\n    x = 1\n"


@functools.cache
def trained():
    """Trains a head of a tiny random target. Returns the pair, the target, and what came."""
    values = eagle3_command.settings(
        dataclasses.replace(TARGET, eos_token_ids=(0,)), layers_given=(1, 0, 3)
    )
    pair, target = (
        acceptance.Pair(TARGET, read(Settings(values), TARGET)),
        tiny.random_params(TARGET),
    )
    rows = written(target)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax's
        result = training.fit(pair, target, TRAIN, rows, rows[:16])
    return pair, target, result


def written(target) -> np.ndarray:
    stream, places = text_of(6, 400), np.arange(1, 200)
    return rollouts(TARGET, target, stream, places, shape=(64, 32), seed=0)


def models():
    """Returns the pair and the weights of both, the head's trained: some of its drafts stand."""
    pair, target, result = trained()
    return pair, target, jax.tree.map(jnp.asarray, result.params)


def inputs_of(tokens) -> Inputs:
    place = jnp.arange(len(tokens), dtype=jnp.int32)
    return Inputs(jnp.asarray(tokens, jnp.int32), place, jnp.full_like(place, len(tokens)))


def padded(rows, size: int):
    """Returns rows and zeros behind them, which change nothing: one program serves all lengths."""
    rows = np.asarray(rows)
    return np.pad(rows, [(0, size - len(rows)), *[(0, 0)] * (rows.ndim - 1)])


def run_target(tokens):
    """Returns states and logits, [T, ...], of one text."""
    size = max(len(tokens), 2 * L)
    states, scores = jax.device_get(_run_target(padded(tokens, size)))
    return [state[: len(tokens)] for state in states], scores[: len(tokens)]


@jax.jit
def _run_target(tokens):
    pair, target, _ = models()
    inputs, names = inputs_of(tokens), [f"residual.{i}" for i in pair.head.aux_layers]
    x = llama.embed(TARGET, target, inputs)
    caches = (None,) * TARGET.num_hidden_layers
    hidden, _, found = llama.layers(
        TARGET, target, x, caches, inputs, dense(1), extras=tuple(names)
    )
    return [found[name] for name in names], llama.logits(TARGET, target, hidden)


def run_head(tokens, states):
    """Returns logits, [T, V], and outputs, for tokens [T] behind the states [T, E]."""
    given, fed_back = jax.device_get(_run_head(padded(tokens, 2 * L), padded(states, 2 * L)))
    return given[: len(tokens)], fed_back[: len(tokens)]


@jax.jit
def _run_head(tokens, states):
    pair, target, head = models()
    embeddings = target.embed[jnp.asarray(tokens)]
    hidden, fed_back, _ = eagle3.layers(
        pair.head, head, embeddings, states, None, inputs_of(tokens), dense(1)
    )
    given = eagle3.logits(pair.head, head, acceptance.head_of(target), hidden)
    return given, fed_back


def text_of(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TARGET.vocab_size, shape).astype(np.int32)


@pytest.mark.slow
def test_a_chain_sees_its_text_and_itself_alone():
    pair, target, _ = models()
    texts, chains = text_of(0, B, L), text_of(1, 2, B, L)
    place = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32)[None], (B, L)).reshape(-1)
    run = jax.jit(functools.partial(acceptance.read_states, pair, batch_size=B))
    aux, scores, kept = run(target, (jnp.asarray(texts.reshape(-1)), place), None)
    want_aux, want = run_target(texts[1])
    np.testing.assert_allclose(scores.reshape(B, L, -1)[1], want, atol=1e-4)
    np.testing.assert_allclose(aux[1].reshape(B, L, -1)[1], want_aux[1], atol=1e-4)
    for i in (0, 1):
        given = jnp.asarray(chains[i].reshape(-1)), place + 1 + i
        _, scores, kept = run(target, given, kept)
        scores = np.asarray(scores)
        for row, at in ((0, 0), (0, 6), (1, 3)):
            whole = [*texts[row, : at + 1], *chains[: i + 1, row, at]]
            got = scores.reshape(B, L, -1)[row, at]
            np.testing.assert_allclose(got, run_target(whole)[1][-1], atol=1e-4)


@pytest.mark.slow
def test_losses_are_of_what_the_head_itself_fed_back():
    pair, target, head = models()
    window = text_of(2, 1, L)
    losses_of = jax.jit(training.draft_losses, static_argnums=(0, 3))
    got = losses_of(pair, (target, head), jnp.asarray(window), 2)
    aux, scores = run_target(window[0])
    states = np.asarray(eagle3.feature(pair.head, head, tuple(aux)))
    losses = np.zeros(2)
    for i, count in ((0, L - 1), (1, L - 2)):
        for at in range(count):
            tokens = [*window[0, 1 : at + 2], *window[0, at + 2 : at + 2 + i]]
            x = states[: at + 1]
            if i:
                x = np.concatenate([x, run_head(tokens[:-1], x)[1][-1:]])
            given = jax.nn.log_softmax(run_head(tokens, x)[0][-1])
            losses[i] -= float((jax.nn.softmax(scores[at + 1 + i]) * given).sum()) / count
    np.testing.assert_allclose(got, losses, rtol=1e-5)


@pytest.mark.slow
def test_a_head_that_knows_the_target_s_noise_stands_where_a_greedy_one_would_not():
    pair, target, head = models()
    run = functools.partial(acceptance.acceptance, pair, (target, head), text_of(4, 4, L))
    hot = run(temperature=50.0)  # noise decides all, and is the same for both
    assert hot[:, 0].mean() > 0.9 > run()[:, 0].mean()


@pytest.mark.slow
def test_what_is_written_begins_as_the_corpus_and_goes_on_as_the_model(monkeypatch):
    monkeypatch.setattr(rollout, "OPENING", (8, 9))
    _, target, _ = models()
    stream, shape = text_of(5, 400), (8, 40)
    tokens = rollouts(TARGET, target, stream, np.arange(1, 200), shape=shape, seed=0)
    assert tokens.shape == shape and not tokens[:, 0].any()
    windows = np.lib.stride_tricks.sliding_window_view(stream, 7)
    assert all((windows == row[1:8]).all(1).any() for row in tokens)
    greedy = tokens[7]  # rows take temperatures in turn, and the eighth is 0
    want = np.argmax(run_target(greedy)[1], -1)
    assert (want[7:-1] == greedy[8:]).all() and len({tuple(row[8:]) for row in tokens}) == 8
    again = rollouts(TARGET, target, stream, np.arange(1, 200), shape=shape, seed=0)
    assert (again == tokens).all()


def test_rows_are_of_one_length():
    parts = [np.arange(12).reshape(2, 6), np.arange(100, 109)]
    assert rows_of(parts, 4).tolist() == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [100, 101, 102, 103], [104, 105, 106, 107]
    ]  # fmt: skip


@pytest.mark.slow
def test_training_makes_the_loss_fall_and_drafts_stand():
    *_, result = trained()
    first, last = result.curve
    assert last["train_loss"] < first["train_loss"] < np.log(61) and last["step"] == 60
    assert result.best["length"] == max(first["length"], last["length"]) > 1.2


@pytest.mark.slow
def test_training_ends_at_the_first_measure_behind_its_budget():
    pair, target, _ = models()
    late, rows = dataclasses.replace(TRAIN, eval_every=1, budget_s=0.0), written(target)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        stopped = training.fit(pair, target, late, rows, rows[:16], report=lambda _: None)
    assert [entry["step"] for entry in stopped.curve] == [1]


@pytest.mark.slow
def test_the_command_writes_a_head_that_loads(tmp_path, monkeypatch, capsys):
    texts = [CODE.replace("add", f"add_{i}").replace("Box", f"Box{i}") * 2 for i in range(40)]
    bpe = text.train_tokenizer(texts, 320)
    config = dataclasses.replace(TARGET, vocab_size=bpe.get_vocab_size())
    values = tiny.SETTINGS | dict(
        num_hidden_layers=5, tie_word_embeddings=True, vocab_size=config.vocab_size,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    save_checkpoint(tmp_path / "target", llama, config, tiny.random_params(config), values)
    text.save_tokenizer(bpe, tmp_path / "target", 128)
    (stdlib := tmp_path / "lib").mkdir()
    for i, content in enumerate(texts):
        (stdlib / f"m{i}.py").write_text(content)
    assert any(file.held_out for file in corpus.read_corpus(stdlib))
    out = tmp_path / "head"
    options = dict(steps=2, batch=2, length=16, rows=3, row_len=32, rollouts=1, eval_every=1)
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    folders = [f"--out={out}", f"--target={tmp_path / 'target'}", f"--stdlib={stdlib}"]
    monkeypatch.setattr(sys, "argv", ["train", "eagle3", *folders, *argv, "--layers", "0", "2"])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        __main__.main()
    assert "tokens written" in capsys.readouterr().out
    head, weights = load_drafter(out, config, dtype="float32")
    assert head.aux_layers == (1, 3) and weights.head is None and weights.embed is None
    record = json.loads((out / "training.json").read_text())
    assert record["tokens_written"] == 96 and record["best"] in record["curve"]
    assert record["parameters"] == sum(p.size for p in jax.tree.leaves(weights))
