"""Decoders written in flax give the tokens of our own, and weights cross over bit for bit."""

from dataclasses import replace
from functools import cache, partial
import re
from typing import Any

from flax import linen, nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.loading import weights
from jaxrunner.model import Model
from jaxrunner.models.from_flax import from_linen, from_nnx, from_nnx_state, to_nnx_state, uncached
from jaxrunner.models.llama import Params, llama
from jaxrunner.models.rope import rotation
from jaxrunner.ops.plain import linear, rms_norm, rotate, swiglu
from jaxrunner.runner.program_cache import is_ours
from jaxrunner.scheduling.request import Request
from jaxrunner.types import Inputs
from tests.support import tiny

# A window for one layer alone: two cache groups, so that a mix-up of layers shows.
CONFIG = replace(tiny.config(), windows=(5, None))
H, K, D, E, F, V = 6, 2, 8, 20, 28, 61
HEADS, EPS, dense = dict(q=H, k=K, v=K), CONFIG.rms_norm_eps, partial(linen.Dense, use_bias=False)
LONG = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9]
PROMPTS = [[*LONG[:12], 9, 7, 9], [9, 2, 6], [60], LONG]


def zeros(*shape: int) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape))


class NnxLayer(nnx.Module):
    """A layer of our names, whose queries and keys `attend` turns."""

    def __init__(self):
        self.attn_norm, self.mlp_norm = zeros(E), zeros(E)
        self.qkv, self.o = zeros(K, H // K + 2, D, E), zeros(E, H, D)
        self.gate_up, self.down = zeros(2, F, E), zeros(E, F)

    def __call__(self, x, attend):
        qkv = linear(rms_norm(x, self.attn_norm[...], EPS), self.qkv[...])
        out = attend(qkv[:, :, :-2].reshape(-1, H, D), qkv[:, :, -2], qkv[:, :, -1], rotate=True)
        x = x + linear(out, self.o[...], axes=2)
        units = swiglu(rms_norm(x, self.mlp_norm[...], EPS), self.gate_up[...])
        return x + linear(units, self.down[...])


class NnxDecoder(nnx.Module):
    """Our decoder as a flax user may write it. Has random state too, which serving leaves alone."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.norm, self.head = zeros(V, E), zeros(E), zeros(V, E)
        self.layers = nnx.List([NnxLayer() for _ in range(2)])
        self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

    def __call__(self, token_ids, positions, attend):
        x = self.embed[...][token_ids]
        for layer in self.layers:
            x = self.dropout(layer(x, attend))
        return rms_norm(x, self.norm[...], EPS)

    def logits(self, hidden):
        return linear(hidden, self.head[...])


class LinenLayer(linen.Module):
    """A layer of flax's own parts, with rotary positions of its own."""

    @linen.compact
    def __call__(self, x, turn, attend):
        h = linen.RMSNorm(name="attn_norm")(x)
        q, k, v = (dense(n * D, name=name)(h).reshape(-1, n, D) for name, n in HEADS.items())
        out = attend(rotate(q, *turn), rotate(k, *turn), v)
        x = x + dense(E, name="o")(out.reshape(-1, H * D))
        h = linen.RMSNorm(name="mlp_norm")(x)
        units = linen.silu(dense(F, name="gate")(h)) * dense(F, name="up")(h)
        return x + dense(E, name="down")(units)


class LinenDecoder(linen.Module):
    """A decoder of flax's own parts."""

    def setup(self):
        self.embed, self.norm, self.head = linen.Embed(V, E), linen.RMSNorm(), dense(V)
        self.layers = [LinenLayer() for _ in range(2)]

    def __call__(self, token_ids, positions, attend):
        x = self.embed(token_ids)
        turn = rotation(CONFIG.rope, Inputs(token_ids, positions, positions))
        for layer in self.layers:
            x = layer(x, turn, attend)
        return self.norm(x)

    def logits(self, hidden):
        return self.head(hidden)


@cache
def split_nnx():
    """Returns an nnx decoder of tiny's weights, split."""
    decoder = NnxDecoder(nnx.Rngs(0))
    nnx.update(decoder, to_nnx_state(tiny.random_params(CONFIG)))
    return nnx.split(decoder)


def linen_model():
    """Returns a linen decoder of tiny's weights, under flax's names and in flax's layout."""
    ours = tiny.random_params(CONFIG)
    assert ours.head is not None
    named = dict(embed={"embedding": ours.embed}, head={"kernel": ours.head.T})
    named["norm"] = {"scale": ours.norm}
    for i, w in enumerate(ours.layers):
        q, k, v = w.qkv[:, :-2], w.qkv[:, -2], w.qkv[:, -1]
        rows = dict(q=q, k=k, v=v, o=w.o, gate=w.gate_up[0], up=w.gate_up[1], down=w.down)
        inputs = dict.fromkeys(rows, E) | dict(o=H * D, down=F)
        layer = {name: {"kernel": rows[name].reshape(-1, inputs[name]).T} for name in rows}
        norms = dict(attn_norm={"scale": w.attn_norm}, mlp_norm={"scale": w.mlp_norm})
        named[f"layers_{i}"] = layer | norms
    return from_linen(LinenDecoder(), {"params": named}, CONFIG), {"params": named}


def nnx_model():
    graphdef, state = split_nnx()
    return from_nnx(graphdef, state, CONFIG), state


def finished(served: tuple[Model, Any], sampling: SamplingParams, **changes) -> list[Request]:
    """Returns the requests of all prompts at once, done."""
    model, params = served
    e = Engine(model, CONFIG, tiny.engine_config(**changes), params)
    requests = [e.add(f"{i}", prompt, sampling) for i, prompt in enumerate(PROMPTS)]
    while e.has_unfinished:
        e.step()
    assert all(len(r.output_token_ids) == sampling.max_tokens for r in requests)
    assert not changes.get("num_blocks") or e.scheduler.num_preemptions > 0
    return requests


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=3, prompt_logprobs=2)


@cache
def ours(greedy: bool) -> list[Request]:
    return finished((llama, tiny.random_params(CONFIG)), GREEDY if greedy else SAMPLED)


@pytest.mark.parametrize("make", [nnx_model, linen_model])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="batched"),
        pytest.param(dict(max_num_batched_tokens=5, token_buckets=(5,)), id="chunked prefill"),
        pytest.param(dict(num_blocks=13), id="preempted", marks=pytest.mark.slow),
        pytest.param(dict(num_decode_steps=4), id="4 steps a launch", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_equal_those_of_our_own_decoder(make, changes):
    got = [r.output_token_ids for r in finished(make(), GREEDY, **changes)]
    assert got == [r.output_token_ids for r in ours(True)]
    assert len({tuple(tokens) for tokens in got}) == len(PROMPTS)


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
    assert state["layers"][1]["qkv"][...] is params.layers[1].qkv


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
