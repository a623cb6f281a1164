"""Decoders written in flax give the tokens of our own, and weights cross over bit for bit."""

from dataclasses import replace
from functools import cache, partial
import re
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.loading import weights
from jaxrunner.model import Model
from jaxrunner.models.from_flax import from_nnx, from_nnx_state, to_nnx_state, uncached
from jaxrunner.models.llama import Params, llama
from jaxrunner.programs.program_cache import is_ours
from jaxrunner.scheduling.request import Request
from tests.support import tiny
from tests.support.flax_decoders import (
    CONFIG,
    E,
    NnxDecoder,
    linen_model,
    nnx_model,
    split_nnx,
)

LONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9]
PROMPTS = [[*LONG[:12], 9, 7, 9], [9, 2, 6], [60], LONG]


def finished(served: tuple[Model, Any], sampling: SamplingParams, **changes) -> list[Request]:
    """Returns the requests of all prompts at once, done."""
    model, params = served
    e = Engine(model, CONFIG, tiny.engine_config(**changes), params)
    requests = [e.add(f"{i}", prompt, sampling) for i, prompt in enumerate(PROMPTS)]
    while e.has_unfinished:
        e.step()
    assert all(len(r.output_token_ids) == sampling.max_tokens for r in requests)
    return requests


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=3, prompt_logprobs=2)


@cache
def ours(greedy: bool) -> list[Request]:
    return finished((llama, tiny.random_params(CONFIG)), GREEDY if greedy else SAMPLED)


CHUNKS = dict(max_num_batched_tokens=5, token_buckets=(5,))


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        pytest.param(nnx_model, CHUNKS, id="nnx, chunked prefill", marks=pytest.mark.slow),
        pytest.param(linen_model, {}, id="linen, batched"),
    ],
)
def test_greedy_tokens_equal_those_of_our_own_decoder(make, changes):
    got = [r.output_token_ids for r in finished(make(), GREEDY, **changes)]
    assert got == [r.output_token_ids for r in ours(True)]
    assert len({tuple(tokens) for tokens in got}) == len(PROMPTS)


@pytest.mark.slow
def test_a_pure_state_draws_and_scores_as_our_own_decoder():
    graphdef, state = split_nnx()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    served = from_nnx(graphdef, shapes, CONFIG), nnx.to_pure_dict(state)
    for got, want in zip(finished(served, SAMPLED), ours(False), strict=True):
        assert got.output_token_ids == want.output_token_ids
        near = partial(np.testing.assert_allclose, atol=1e-4)
        jax.tree.map(near, got.prompt_logprobs, want.prompt_logprobs)


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(num_hidden_layers=3, windows=(5,) * 3),
         "attend must be called num_hidden_layers=3 times, got 2: call it once in each layer, or"),
        (dict(num_hidden_layers=1),
         "attend must be called num_hidden_layers=1 times, got one call more: call it once in"),
        (dict(num_attention_heads=8), "q of layer 0 must be of shape [3, 8, 8], got [3, 6, 8]: sp"),
        (dict(num_key_value_heads=3), "k of layer 0 must be of shape [3, 3, 8], got [3, 2, 8]: sp"),
        (dict(hidden_size=24), "hidden must be of shape [3, 24], got [3, 20]: return it from __ca"),
        (dict(vocab_size=64), "logits must be of shape [3, 64], got [3, 61]: return scores of the"),
    ],
)  # fmt: skip
def test_a_module_that_differs_from_the_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_nnx(*split_nnx(), replace(CONFIG, **changes))


class Changed(NnxDecoder):
    """A decoder that calls, and is called, otherwise."""

    def __init__(self, change):
        super().__init__(nnx.Rngs(0))
        self.change = change

    def __call__(self, *args):
        return self.change(super().__call__, *args)

    def logits(self, hidden):
        return super().logits(hidden).astype(jnp.float16)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda call, ids, at, attend: (call(ids, at, attend), None),
         "hidden must be of shape [3, 20], got tuple: return it from __call__, or correct hidden"),
        (lambda call, ids, at, attend: jax.checkpoint(lambda x: call(x, at, attend))(ids),
         "attend must be called outside of transformations, layer 0 is inside one (scan, remat"),
        (lambda call, ids, at, f: call(ids, at, lambda q, k, v, **_: f(q, k, v.astype("f2"))),
         "q, k and v of layer 0 must have one dtype, got float32, float32 and float16: cast them"),
    ],
)  # fmt: skip
def test_a_module_that_is_no_decoder_is_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_nnx(*nnx.split(Changed(change)), CONFIG)


def test_logits_have_the_dtype_of_hidden():
    graphdef, state = nnx.split(Changed(lambda call, *args: call(*args)))
    model = from_nnx(graphdef, state, CONFIG)
    assert model.logits(CONFIG, state, jnp.zeros((4, 7, E))).dtype == jnp.float32


def test_a_module_outside_of_an_engine_gives_the_same_logits():
    scaling = dict(rope_type="dynamic", factor=3.0)  # by the length of each sequence
    config = tiny.config(max_position_embeddings=16, rope_parameters=scaling)
    decoder, ids = nnx.merge(*split_nnx()), jnp.asarray(LONG * 2)
    positions = jnp.tile(jnp.arange(len(LONG)), 2)
    hidden = decoder(ids, positions, uncached(config, positions, batch_size=2))
    want = tiny.dense_logits(config, tiny.random_params(config), LONG)
    np.testing.assert_allclose(decoder.logits(hidden), np.tile(want, (2, 1)), atol=1e-4)


def test_a_flax_model_has_no_checkpoint_and_no_random_params(tmp_path):
    model, params = nnx_model()
    where = tmp_path, model, CONFIG
    load = partial(weights.load_params, *where, dtype="float32")
    save = partial(weights.save_checkpoint, *where, params, {})
    for use in (partial(model.read, {}), load, save):
        with pytest.raises(ValueError, match="a flax model names no tensors of one: save and rest"):
            use()
    with pytest.raises(ValueError, match=r"params of a flax model declare no axes.*initialise the"):
        weights.random_params(model, CONFIG, "float32", 0)


def test_programs_of_a_users_code_are_not_kept_on_disk():
    models = nnx_model()[0], linen_model()[0]
    assert not any(is_ours(f) for model in models for f in (model.layers, model.logits))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "changes", [{}, dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)]
)
def test_params_cross_over_to_an_nnx_state_and_back_bit_for_bit(changes, dtype):
    config = tiny.config(**changes)
    rng, dims = np.random.default_rng(0), config.dims | {"param": dtype}

    def make(_, shape, dtype):  # NaNs of all kinds too, which no arithmetic would keep
        bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        return jnp.asarray(bits.view(dtype)[..., 0])

    params = pytree.build(make, Params, dims)
    state = to_nnx_state(params)
    back = from_nnx_state(state, Params, dims)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        assert (got.dtype, np.asarray(got).tobytes()) == (want.dtype, np.asarray(want).tobytes())
    assert state["layers"][1]["qkv"]["weight"][...] is params.layers[1].qkv.weight


def test_a_module_with_our_names_gives_our_params_back():
    decoder = nnx.merge(*split_nnx())
    back = from_nnx_state(nnx.state(decoder, nnx.Param), Params, CONFIG.dims | {"param": "float32"})
    jax.tree.map(np.testing.assert_array_equal, back, tiny.random_params(CONFIG))


def test_a_state_that_is_not_ours_is_refused():
    state = to_nnx_state(tiny.random_params(CONFIG))
    lacking = {name: x for name, x in nnx.to_pure_dict(state).items() if name != "norm"}
    for other, dtype, message in (
        (split_nnx()[1], "float32", "[] missing, ['dropout/rngs/count', 'dropout/rngs/key'] unkno"),
        (nnx.State(lacking), "float32",
         "state must hold the weights of Params: ['norm'] missing, [] unknown: rename them, and"),
        (state, "bfloat16", "Params.embed must be bfloat16[61, 20], got float32[61, 20]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)):
            from_nnx_state(other, Params, CONFIG.dims | {"param": dtype})
