"""A KV cache of 8 bits: how near it is, and that it changes nothing else of an engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.config import EngineConfig, read_kv_dtype
from jaxrunner.engine.engine import Engine
from jaxrunner.kernels_pallas import reference
from jaxrunner.model import AttentionSpec
from jaxrunner.models.llama import llama
from jaxrunner.program.state import make_state
from jaxrunner.scheduling.request import Request
from jaxrunner.types import LayerCache
from jaxrunner.worker import sizing
from tests.support import paged_attention, tiny, tiny_engine

# Of each dtype: half a step, as a part of the largest number of a row, and of the number itself.
STEPS = {"int8": (0.5 / 127, 0.0), "float8_e4m3fn": (2.0**-10 / 448, 2.0**-4)}
# The largest error of attention, as a part of the largest value, over heavy-tailed keys and values.
ATTENTION = {"int8": 0.03, "float8_e4m3fn": 0.05}
# The largest error of a logit, as a part of the largest logit.
LOGITS = {"int8": 0.01, "fp8": 0.04}


quantize = jax.jit(reference.quantize, static_argnums=1)


def heavy(rng, *shape):
    """Student's t with three degrees of freedom: rare values are many times the others."""
    return rng.standard_t(3, shape).astype(np.float32)


@pytest.mark.parametrize("dtype", STEPS)
def test_a_row_is_rounded_to_the_nearest_step(dtype):
    x = heavy(np.random.default_rng(0), 500, 3, 64) * np.float32(0.01)
    x[7], x[8, 1] = 0.0, 1e-38
    low, scale = quantize(jnp.asarray(x), jnp.dtype(dtype))
    back = np.asarray(low, np.float64) * np.asarray(scale, np.float64)[..., None]
    of_row, of_value = STEPS[dtype]
    # The scale has eight bits, so a step may be 2**-8 wider, or the largest be cut by as much.
    top = np.abs(x).max(-1, keepdims=True)
    bound = np.maximum(of_row * top, of_value * np.abs(x)) * (1 + 2.0**-7) + 1e-37
    assert (np.abs(back - x) <= bound).all()
    assert (back[7] == 0).all() and (np.asarray(scale) > 0).all()
    assert (np.asarray(scale) == np.asarray(scale.astype(jnp.bfloat16), np.float32)).all()


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_still_shows(dtype, value):
    x = np.ones((2, 8), np.float32)
    x[1, 3] = value
    low, scale = quantize(jnp.asarray(x), jnp.dtype(dtype))
    with np.errstate(invalid="ignore"):
        back = np.asarray(low, np.float32) * np.asarray(scale)[..., None]
    assert np.isfinite(back[0]).all() and not np.isfinite(back[1]).all()


class Problem(paged_attention.Problem):
    """Heavy-tailed keys and values, and a cache of 8 bits, full of junk where none of them is."""

    def __init__(self, case: str, dtype: str, kv_dtype: str):
        super().__init__(case, dtype)
        rng = np.random.default_rng(2)
        self.k, self.v = (heavy(rng, *self.k.shape).astype(self.k.dtype) for _ in range(2))
        self.history = heavy(rng, *self.history.shape).astype(self.history.dtype)
        N, (K, S, D) = self.cache.shape[1], self.cache.shape[2:]
        bits = np.full((2, N, K, S, D), 0x7F, np.int8)  # NaN in e4m3
        low, scale = bits.view(jnp.dtype(kv_dtype)), np.full((2, N, K, S), np.nan, np.float32)
        values, scales = (
            np.asarray(x) for x in quantize(jnp.asarray(self.history), jnp.dtype(kv_dtype))
        )
        for b in range(len(self.counts)):
            for p in range(self.computed[b]):
                low[:, *self.cell(b, p)] = values[b, :, p]
                scale[:, *self.cell(b, p)] = scales[b, :, p]
        self.low = LayerCache(*map(jnp.asarray, (*low, *scale)))


@paged_attention.BOTH
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case in ("prefill", "block edges")))
        for case in paged_attention.CASES
    ],
)
@pytest.mark.parametrize(
    "kv_dtype,dtype,window", [("int8", "bfloat16", 5), ("float8_e4m3fn", "float32", None)]
)
def test_attention_is_near_its_oracle(kv_dtype, dtype, window, case, attention):
    problem = Problem(case, dtype, kv_dtype)
    spec = AttentionSpec(0, window, problem.q.shape[2] ** -0.5)
    inputs = map(jnp.asarray, (problem.q, problem.k, problem.v))
    out, after = attention(problem.batch, *inputs, problem.low, spec=spec)
    out, touched = np.asarray(out, np.float64), np.zeros(after.k.shape[:3], bool)
    assert np.isfinite(out).all()
    for b, tokens, positions in problem.rows():
        want = problem.want(b, tokens, positions, window)
        assert np.abs(out[tokens] - want).max() < ATTENTION[kv_dtype] * np.abs(want).max()
        for p in positions:
            touched[problem.cell(b, p)] = True
    for name in ("k", "v", "k_scale", "v_scale"):
        old, new = (np.asarray(getattr(x, name)) for x in (problem.low, after))
        width = old.dtype.itemsize
        same = old.view(f"i{width}") == new.view(f"i{width}")
        assert (same | touched.reshape(touched.shape + (1,) * (old.ndim - 3))).all()


def engine(kv_cache_dtype: str, **changes) -> Engine:
    """An engine of the tiny decoder whose sizes are `tiny.engine_config`'s."""
    config, params = tiny.model_and_params()
    kv_dtype = read_kv_dtype(kv_cache_dtype, tiny.loaded().dtype)
    return Engine(llama, config, tiny.engine_config(kv_dtype=kv_dtype, **changes), params)


def params() -> list[SamplingParams]:
    """Greedy and sampled requests."""
    count = range(len(tiny_engine.PROMPTS))
    return [tiny_engine.params_of(("greedy", "sampled")[i % 2], i) for i in count]


@functools.cache
def shared(kv_cache_dtype: str) -> Engine:
    """Returns an engine that forgets prefixes after each use."""
    return engine(kv_cache_dtype)


def forgetting(kv_cache_dtype: str, prompt: list[int], one: SamplingParams) -> list[int]:
    """Returns the tokens of a request that finds nothing in the engine."""
    e = shared(kv_cache_dtype)
    (output,) = tiny_engine.run(e, [prompt], [one])
    assert e.scheduler.reset_prefix_cache()
    return output


@functools.cache
def alone(kv_cache_dtype: str) -> list[list[int]]:
    """Each prompt's tokens when nothing else is in the engine."""
    pairs = zip(tiny_engine.PROMPTS, params(), strict=True)
    return [forgetting(kv_cache_dtype, prompt, p) for prompt, p in pairs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_cache_dtype", "changes"),
    [
        pytest.param("int8", dict(num_blocks=13), id="int8, preempted"),
        pytest.param(
            "fp8", dict(max_num_batched_tokens=5, token_buckets=(5,)), id="fp8, chunks of 5"
        ),
    ],
)
def test_tokens_depend_on_the_request_alone(kv_cache_dtype, changes):
    e = engine(kv_cache_dtype, **changes)
    assert tiny_engine.run(e, tiny_engine.PROMPTS, params()) == alone(kv_cache_dtype)
    assert (e.scheduler.num_preemptions > 0) == ("num_blocks" in changes)


@pytest.mark.parametrize("kv_cache_dtype", LOGITS)
def test_a_cached_prefix_changes_nothing(kv_cache_dtype):
    want, e, hits = alone(kv_cache_dtype), shared(kv_cache_dtype), []
    for _ in range(2):
        requests: list[Request] = [
            e.add(f"{i}", prompt, p)
            for i, (prompt, p) in enumerate(zip(tiny_engine.PROMPTS, params(), strict=True))
        ]
        tiny_engine.drain(e)
        assert [r.output_token_ids for r in requests] == want
        hits.append(requests[0].num_cached_tokens)
    assert hits[0] == 0 < hits[1] and e.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("kv_cache_dtype", LOGITS)
def test_copied_blocks_bring_their_scales(kv_cache_dtype):
    e = shared(kv_cache_dtype)
    kv, num_layers = e.runner.state.kv, e.runner.program.dims["Y"]
    sizes = {x.dtype.itemsize for x in jax.tree.leaves(kv)}
    assert sizes == {1, 4} and len(jax.tree.leaves(kv)) == 4 * num_layers
    params = [SamplingParams(temperature=1.0, max_tokens=8, seed=i) for i in range(4)]
    prompt = tiny_engine.PROMPTS[0][:10]  # ends within a block: followers copy it
    want = [forgetting(kv_cache_dtype, prompt, p) for p in params]
    first = e.add("0", prompt, params[0])
    rest = [e.add(f"{i}", prompt, p, prefix_from=first) for i, p in enumerate(params[1:], 1)]
    tiny_engine.drain(e)
    assert [r.output_token_ids for r in (first, *rest)] == want
    assert e.scheduler.reset_prefix_cache()


@functools.cache
def prompt_logits(kv_cache_dtype: str) -> np.ndarray:
    """Returns the logits of a prompt's tokens, [U, V]."""
    e = engine(kv_cache_dtype, logprobs_mode="raw_logits")
    wanted = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=61)
    request = e.add("a", tiny_engine.PROMPTS[5], wanted)
    tiny_engine.drain(e)
    return logits(request)


@pytest.mark.parametrize("kv_cache_dtype", LOGITS)
def test_logits_are_near_those_of_the_whole_cache(kv_cache_dtype):
    whole, low = prompt_logits("auto"), prompt_logits(kv_cache_dtype)
    assert 0 < np.abs(low - whole).max() < LOGITS[kv_cache_dtype] * np.abs(whole).max()


def logits(request: Request) -> np.ndarray:
    """Returns the logits of a request's prompt tokens, [U, V]."""
    parts = []
    for _, logprobs in request.prompt_logprobs:
        dense = np.zeros(logprobs.top_ids.shape)
        np.put_along_axis(dense, logprobs.top_ids, logprobs.top_value, axis=-1)
        parts.append(dense)
    return np.concatenate(parts)


def test_a_closed_engine_gives_its_scales_back():
    e = engine("int8")
    leaves = jax.tree.leaves(e.runner.state.kv)
    e.close()
    assert all(x.is_deleted() for x in leaves)


def test_a_cache_of_whole_numbers_has_no_scales():
    cache = make_state(engine("auto").runner.program).kv[0]
    assert (cache.k_scale, cache.v_scale) == (None, None)
    dims = tiny.config().dims | dict(N=3, S=4, kv=jnp.dtype("int8"), scaled=True)
    assert jax.tree.leaves(pytree.zeros(LayerCache, dims))[3].shape == (3, dims["K"], 4)


def test_other_names_are_refused():
    known = r"\('auto', 'float32', 'bfloat16', 'float16', 'fp8', 'fp8_e4m3', 'int8'\)"
    with pytest.raises(ValueError, match=rf"kv_cache_dtype must be one of {known}, got 'int4'"):
        sizing.plan_engine(tiny.loaded(), kv_cache_dtype="int4")
    with pytest.raises(ValueError, match=r"kv_dtype must be one of .*'float8_e4m3fn', 'int8'"):
        EngineConfig(max_model_len=8, num_blocks=8, kv_dtype="fp8_e5m2")
