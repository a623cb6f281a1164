"""The EAGLE-3 head against NumPy in float64, and the checkpoints that are read or refused."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.hf_config import Settings
from jaxrunner.linear import Linear
from jaxrunner.loading.speculation import read_drafter
from jaxrunner.loading.weights import save_checkpoint
from jaxrunner.ops.backends import dense
from jaxrunner.speculators import eagle3_head as eagle3
from jaxrunner.speculators.eagle3 import eagle3 as drafter
from jaxrunner.speculators.eagle3_config import read
from jaxrunner.types import Inputs
from tests.support import eagle3_reference as reference
from tests.support import tiny
from tests.support.heads import load_drafter

T = 11
AUX, NORMED, SPECFORGE = reference.AUX, reference.NORMED, reference.SPECFORGE
TARGET, DRAFT_V, E, V = reference.TARGET, reference.DRAFT_V, reference.E, reference.V
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[int, ...]]] = {
    "SpecForge": (SPECFORGE, ("lm_head.weight", "d2t"), (2, 3, 4)),
    "speculators": (
        reference.SPECULATORS, ("lm_head.weight", "embed_tokens.weight", "d2t"), (1, 4, 6),
    ),
    "EAGLE-3.1": (NORMED, ("q_norm.weight", "k_norm.weight"), (2, 3, 4)),
    "of two layers": (reference.LAYER | AUX | {"architectures": ["Eagle3LlamaForCausalLM"]},
                      (), (1, 3)),
}  # fmt: skip


def checkpoint(folder, kind: str) -> dict[str, np.ndarray]:
    settings, also, aux = KINDS[kind]
    weights = reference.tensors(settings, *also, num_aux=len(aux))
    reference.save(folder, settings, weights)
    return weights


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_computes_what_its_makers_describe(tmp_path, kind):
    settings, _, layers = KINDS[kind]
    w = checkpoint(tmp_path, kind)
    config, params = load_drafter(tmp_path, TARGET, dtype="float32")
    pytree.check(params, config.dims | {"param": jnp.float32})
    assert config.aux_layers == layers
    rng = np.random.default_rng(0)
    aux = [rng.normal(size=(T, E)) for _ in layers]
    embeddings, target_head = rng.normal(size=(2, T, E)), rng.normal(size=(V, E))
    place = jnp.arange(T, dtype=jnp.int32)
    inputs = Inputs(place, place, jnp.full_like(place, T))
    x = eagle3.feature(config, params, tuple(jnp.asarray(a, jnp.float32) for a in aux))
    want = reference.feature(settings, w, aux)
    head = Linear(jnp.asarray(target_head, jnp.float32), None)
    for step in (0, 1):  # the second reads what the first fed back
        given = jnp.asarray(embeddings[step], jnp.float32)
        np.testing.assert_allclose(x, want, atol=1e-4)
        hidden, x, cache = eagle3.layers(config, params, given, x, None, inputs, dense(1))
        normed, want = reference.forward(settings, w, embeddings[step], want)
        scores = eagle3.logits(config, params, head, hidden)
        wanted = normed @ w.get("lm_head.weight", target_head).T
        np.testing.assert_allclose(scores, wanted, atol=2e-4)
    assert cache is None and scores.shape[1] == (DRAFT_V if "d2t" in w else V)
    ids = jnp.arange(scores.shape[1], dtype=jnp.int32)
    to = np.asarray(eagle3.to_target_ids(params, ids))
    assert np.array_equal(to, np.flatnonzero(w["t2d"]) if "d2t" in w else ids)
    assert (params.embed is None) == ("embed_tokens.weight" not in w)


def test_logits_of_a_tied_head_are_of_its_own_embedding(tmp_path):
    settings = NORMED | {"tie_word_embeddings": True}
    w = reference.tensors(settings, "embed_tokens.weight")
    reference.save(tmp_path, settings, w)
    config, params = load_drafter(tmp_path, TARGET, dtype="float32")
    hidden = jax.random.normal(jax.random.key(0), (2, E))
    head = Linear(jnp.zeros((V, E)), None)
    scores = eagle3.logits(config, params, head, hidden)
    np.testing.assert_allclose(scores, np.asarray(hidden) @ w["embed_tokens.weight"].T, atol=1e-5)


def test_a_saved_head_is_the_one_that_is_read(tmp_path):
    checkpoint(tmp_path / "a", "EAGLE-3.1")
    config, params = load_drafter(tmp_path / "a", TARGET, dtype="float32")
    save_checkpoint(tmp_path / "b", drafter, config, params, NORMED)
    again, saved = load_drafter(tmp_path / "b", TARGET, dtype="float32")
    assert dataclasses.replace(again, decoder=config.decoder) == config
    jax.tree.map(np.testing.assert_array_equal, saved, params)


def test_all_but_the_projection_runs_through_ops_that_kernels_may_serve(tmp_path):
    checkpoint(tmp_path, "SpecForge")
    config, params = load_drafter(tmp_path, TARGET, dtype="float32")
    place, asked = jnp.arange(T, dtype=jnp.int32), []
    inputs, x = Inputs(place, place, jnp.full_like(place, T)), jnp.ones((T, E))
    eagle3.layers(config, params, x, x, None, inputs, dense(1, note=asked.append))
    assert [chosen.operation for chosen in asked] == ["linear", "attention", "linear", "mlp"]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": (
        {"architectures": ["LlamaForCausalLM"]}, "architectures of an EAGLE-3 head must be one of",
    ),
    "more layers": ({"num_hidden_layers": 2}, "num_hidden_layers of an EAGLE-3 head must be 1"),
    "other vocabulary": ({"vocab_size": 60}, "vocab_size=60 must be the target's, 61"),
    "other width": (
        {"target_hidden_size": 24}, "target_hidden_size=24 must be the target's hidden_size, 20",
    ),
    "no such layer": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, r"inputs of layers \(1, 2, 7\) of",
    ),
    "two sets of layers": (
        {"eagle_aux_hidden_state_layer_ids": [0, 2]} | AUX,
        "counts layers that read a state, and in eagle_config",
    ),
    "narrow": (
        {"hidden_size": 16}, "hidden_size=16 must be the target's, 20, where the head takes",
    ),
    "large draft vocabulary": (
        {"draft_vocab_size": 99}, "draft_vocab_size=99 must be vocab_size=61, or smaller in a",
    ),
    "unknown": ({"truncated_vocab_size": 9}, "1 unknown setting: truncated_vocab_size=9"),
    "no aux states": ({"eagle_config": {"use_aux_hidden_state": False}}, "state=False is not"),
    "another method": ({"speculators_model_type": "dflash"}, "model_type='dflash' is not"),
    "scaled": ({"logit_scale": 2.0}, "logit_scale=2.0 is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_setting_that_is_not_honoured_is_refused(name):
    changes, words = WRONG[name]
    with pytest.raises(ValueError, match=f"config.json: .*{words}"):
        read(Settings(SPECFORGE | changes), TARGET)


def test_a_tied_head_wants_a_target_that_is_tied():
    settings, untied = NORMED | {"tie_word_embeddings": True}, tiny.config(num_hidden_layers=7)
    assert read(Settings(settings), TARGET).is_tied
    with pytest.raises(ValueError, match="logits of the target's embedding, whose own logits"):
        read(Settings(settings), untied)


def test_maps_of_a_vocabulary_are_checked(tmp_path):
    w = checkpoint(tmp_path, "SpecForge")
    reference.save(tmp_path, SPECFORGE, w | {"d2t": w["d2t"] + V})
    with pytest.raises(ValueError, match="d2t must map tokens of the head to ids from 0 to 60"):
        load_drafter(tmp_path, TARGET, dtype="float32")
    reference.save(tmp_path, SPECFORGE, w | {"t2d": ~w["t2d"]})
    with pytest.raises(ValueError, match="t2d must mark the 13 ids that d2t maps to, got 48"):
        load_drafter(tmp_path, TARGET, dtype="float32")
    reference.save(tmp_path, SPECFORGE, {n: a for n, a in w.items() if n != "t2d"})
    load_drafter(tmp_path, TARGET, dtype="float32")
    reference.save(tmp_path, SPECFORGE, {n: a for n, a in w.items() if n != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"with the tensors d2t and lm_head.weight: save"):
        read_drafter("eagle3", tmp_path, TARGET)


def test_a_tensor_that_no_setting_asks_for_is_refused(tmp_path):
    w = checkpoint(tmp_path, "SpecForge")
    (tmp_path / "config.json").write_text(json.dumps(SPECFORGE | {"norm_before_fc": True}))
    with pytest.raises(ValueError, match=r"input_norm.weight \[60\] is missing"):
        load_drafter(tmp_path, TARGET, dtype="float32")
    reference.save(tmp_path, SPECFORGE, w | {"fc_norm.0.weight": np.ones(E, np.float32)})
    with pytest.raises(ValueError, match=r"fc_norm.0.weight .* is not wanted"):
        load_drafter(tmp_path, TARGET, dtype="float32")
