"""Problems for the kernels: sizes of real models for the bench, awkward ones for the tests."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.kernels_pallas.attention.decode_attention import decode_attention
from jaxrunner.kernels_pallas.attention.prefill_attention import prefill_attention
from jaxrunner.kernels_pallas.attention.rope_write import rope_write
from jaxrunner.kernels_pallas.cases.attention_case import (
    DECODES,
    LATENTS,
    PREFILLS,
    VERIFIES,
    Attention,
    latents,
)
from jaxrunner.kernels_pallas.cases.band_case import BANDS, BENCH_BANDS
from jaxrunner.kernels_pallas.cases.case import Case
from jaxrunner.kernels_pallas.cases.chunk_case import LONG_PROMPTS, PROMPTS
from jaxrunner.kernels_pallas.cases.conv_case import CONVS
from jaxrunner.kernels_pallas.cases.fp8_case import BENCH_FP8, FP8
from jaxrunner.kernels_pallas.cases.lora_case import LORA
from jaxrunner.kernels_pallas.cases.mixture_case import (
    choices,
    full_tiles,
    groups,
    mixtures,
    routes,
)
from jaxrunner.kernels_pallas.cases.pair_case import BENCH_PAIRS, PAIRS
from jaxrunner.kernels_pallas.cases.quantized_case import (
    fitted_tiles,
    in_turn,
    quantized_mlps,
    quantized_products,
    quantized_tiles,
)
from jaxrunner.kernels_pallas.cases.quantized_grouped_case import (
    BENCH_QUANTIZED_MIXTURES,
    QUANTIZED_MIXTURES,
)
from jaxrunner.kernels_pallas.cases.state_case import MODELS, STATES
from jaxrunner.kernels_pallas.mixtures.router_scores import How
from jaxrunner.kernels_pallas.products.add_norm import add_rms_norm
from jaxrunner.kernels_pallas.products.gated_mlp import gated_mlp
from jaxrunner.kernels_pallas.products.matmul import glu, matmul
from jaxrunner.kernels_pallas.sampling.sampler import sample_tokens
from jaxrunner.types import Array


def norms(
    T: int, E: int, parts: int | None = None, *, one_more: bool = False, end: bool = False,
    for_words: bool = False,
) -> Case:  # fmt: skip
    """A residual addition and a norm of [T, E]; of `parts` to be summed, if told, maybe none.

    end: the residual is normed first. for_words: the norm comes in the order of words.
    """

    def make(seed: int) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(seed), 4)
        shapes = (T, E), (T, E) if parts is None else (parts, T, E), (E,), (E,)
        x, residual, *weights = map(jax.random.normal, keys, shapes)
        wide = jnp.bfloat16 if parts is None else jnp.float32
        weights = [weight.astype(jnp.bfloat16) for weight in weights[: 1 + end]]
        return x.astype(jnp.bfloat16), residual.astype(wide), *weights

    options: dict[str, Any] = dict(eps=1e-5, one_more=one_more)

    def run(x: Array, residual: Array, weight: Array, end: Array | None = None) -> Any:
        total, norm = add_rms_norm(x, residual, weight, end=end, for_words=for_words, **options)
        return total, in_turn(norm) if for_words else norm

    name = f"{T} x {E}" + ("" if parts is None else f" in {parts} parts")
    name += ", for words" * for_words + ", 1 + w" * one_more + ", normed before" * end
    moved = T * E * (6 + (2 if parts is None else 4 * parts))
    return Case("add_rms_norm", name, make, run, float(moved), "TB/s", options)


def products(T: int, E: int, F: int, *, activation: str | None = None) -> Case:
    """T tokens times a weight, [F, E], or the gate and up projections of a gated MLP."""
    gated = activation is not None

    def make(seed: int) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(seed))
        shape = (2, F, E) if gated else (F, E)
        x, weight = map(jax.random.normal, keys, ((T, E), shape))
        return x.astype(jnp.bfloat16), (weight * E**-0.5).astype(jnp.bfloat16)

    options: dict[str, Any] = dict(activation=activation) if gated else {}
    name, moved = f"{T} x {E} x {F}" + f", {activation}" * gated, 2.0 * E * F * (1 + gated)
    run = functools.partial(glu if gated else matmul, **options)
    return Case("glu" if gated else "matmul", name, make, run, moved, "TB/s", options)


def mlps(T: int, E: int, F: int, activation: str = "silu") -> Case:
    """The gated MLP of T tokens; the parts of its sums are added up."""

    def make(seed: int) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(seed), 3)
        x, gate_up, down = map(jax.random.normal, keys, ((T, E), (2, F, E), (E, F)))
        gate_up, down = gate_up * E**-0.5, down * F**-0.5
        return x.astype(jnp.bfloat16), gate_up.astype(jnp.bfloat16), down.astype(jnp.bfloat16)

    def run(x: Array, gate_up: Array, down: Array) -> Array:
        return gated_mlp(x, gate_up, down, activation).sum(0).astype(x.dtype)

    name, options = f"{T} x {E} x {F}, {activation}", dict(activation=activation)
    return Case("gated_mlp", name, make, run, 6.0 * E * F, "TB/s", options)


def writes(
    T: int, heads: int, kv_heads: int, head_dim: int, *, normed: bool, one_more: bool = False,
    parts: int = 0,
) -> Case:  # fmt: skip
    """Rotation of T tokens, and their keys and values into a cache; every fifth is padding.

    parts: that projections come in; 0 for none.
    """
    K, D, S, P = kv_heads, head_dim, 64, heads // kv_heads + 2
    N = T // S + 3

    def make(seed: int) -> tuple[Array, ...]:
        rng, keys = np.random.default_rng(seed), jax.random.split(jax.random.key(seed), 5)
        cut, dtype = ((parts,), jnp.float32) if parts else ((), jnp.bfloat16)
        qkv = jax.random.normal(keys[0], (*cut, T, K, P, D), dtype)
        angle = jnp.asarray(rng.uniform(0, 6, (T, 1, D // 2)), jnp.float32)
        k, v = (jax.random.normal(key, (N, K, S, D), jnp.bfloat16) for key in keys[1:3])
        at = rng.permutation(N * S)[:T].astype(np.int32)
        at[::5] = N * S
        weights = [jax.random.normal(key, (D,), jnp.bfloat16) for key in keys[3:]] if normed else []
        return qkv, jnp.cos(angle), jnp.sin(angle), k, v, jnp.asarray(at), *weights

    name = f"{T} tokens, {heads} heads of {D}" + ", normed" * normed + ", 1 + w" * one_more
    name += f", {parts} parts" if parts else ""
    options: dict[str, Any] = dict(eps=1e-6, one_more=one_more)
    options |= dict(dtype="bfloat16") if parts else {}
    run = functools.partial(rope_write, **options)
    return Case("rope_write", name, make, run, 4.0 * T * K * P * D, "TB/s", options)


def draws(N: int, V: int, name: str, *, k: int = 0, p: float = 1.0, min_p: float = 0.0) -> Case:
    """Draws for N rows of V logits; every fourth row is greedy."""

    def make(seed: int) -> tuple[Array, ...]:
        rng, key = np.random.default_rng(seed), jax.random.key(seed)
        logits = jax.random.normal(key, (N, V), jnp.float32) * 2
        peaks = jax.random.uniform(jax.random.fold_in(key, 1), (N, V)) < 20 / V
        logits = (logits + jnp.where(peaks, 9.0, 0.0)).astype(jnp.bfloat16)
        words = rng.integers(0, 2**32, (N, 2), np.uint32)
        greedy = np.arange(N) % 4 == 3
        rules = (np.float32(0.8), np.float32(np.log(min_p) if min_p else -np.inf), np.int32(k))
        rows = [np.full(N, value) for value in (*rules, np.float32(p))]
        positions = rng.integers(0, 4096, N, np.int32)
        return logits, *map(jnp.asarray, (words, positions, greedy, *rows))

    options = dict(k=k, p=p, min_p=min_p)
    return Case(
        "sample_tokens", f"{N} x {V}, {name}", make, sample_tokens, 2.0 * N * V, "TB/s", options
    )


TESTS: tuple[Case, ...] = (
    *LATENTS, *LORA, *STATES, *PROMPTS, *QUANTIZED_MIXTURES,
    *(a.case(decode_attention) for a in (*DECODES, *VERIFIES)),
    *(a.case(prefill_attention) for a in PREFILLS),
    *(norms(T, E) for T, E in ((1, 64), (3, 1024), (70, 4096), (2, 16384))),
    norms(5, 1024, parts=4), norms(70, 4096, parts=3), norms(5, 4096, parts=8, one_more=True),
    norms(3, 3840, one_more=True), norms(5, 3840, parts=4, one_more=True, end=True),
    norms(70, 4096, end=True), norms(3, 64, parts=1, end=True),
    norms(64, 4096, parts=4, for_words=True), norms(3, 2048, end=True, for_words=True),
    norms(70, 4096, parts=0),
    products(64, 512, 96), products(128, 4096, 6144), products(192, 1024, 14336),
    products(64, 1024, 48, activation="silu"), products(256, 1024, 14336, activation="gelu_tanh"),
    mlps(8, 1024, 3072), mlps(40, 2048, 8192), mlps(64, 4096, 14336), mlps(128, 1024, 3072),
    mlps(16, 1024, 3072, "gelu_tanh"), mlps(64, 3840, 15360, "gelu_tanh"),
    mixtures(1, 128, 8, 512, 256, tile=8), mixtures(1, 8, 2, 320, 192, tile=8, clamped=True),
    mixtures(9, 8, 2, 512, 256, tile=8),
    mixtures(64, 60, 4, 1024, 384, tile=16), mixtures(200, 160, 6, 512, 128, tile=32),
    mixtures(70, 4, 1, 512, 128, tile=64), mixtures(300, 16, 4, 512, 256, tile=128, consumers=2),
    mixtures(40, 8, 2, 320, 192, tile=32, clamped=True),
    mixtures(300, 8, 4, 320, 192, tile=128, clamped=True),
    quantized_products(8, 512, 96, "float8_e4m3fn", run=32, group=128),
    quantized_products(1, 512, 200, "int8"), quantized_products(24, 512, 96, "int4", group=64),
    quantized_products(64, 1024, 352, "int4", group=128, zero=True),
    quantized_products(128, 768, 64, "float4_e2m1fn", group=256, max_parts=8),
    quantized_products(256, 2048, 512, "int8", max_parts=8),
    # Sums whose last copy is in part of no steps; of fewer steps than warpgroups.
    quantized_products(8, 896, 256, "float8_e4m3fn", run=128, group=128),
    quantized_products(8, 1792, 192, "int4", group=128, zero=True),
    quantized_products(1, 384, 128, "float8_e4m3fn", run=128, group=128),
    quantized_products(16, 4096, 4096, "float8_e4m3fn", run=128, group=128, max_parts=8),
    quantized_mlps(1, 4096, 7168, "int4", group=128),
    quantized_mlps(8, 4096, 7168, "float8_e4m3fn", run=128, group=128),
    quantized_mlps(24, 4096, 1024, "int8"), quantized_mlps(32, 4096, 1024, "float8_e4m3fn"),
    quantized_tiles(64, 1024, 512, "float8_e4m3fn", run=128, group=128, groups=4, exact=True),
    quantized_tiles(64, 1024, 512, "float8_e4m3fn", groups=4),
    quantized_tiles(64, 4608, 256, "int4", group=128, groups=4, exact=True, cluster=1),
    quantized_tiles(64, 1024, 256, "int4", group=128, groups=1, turns=2, parts=2, exact=True),
    quantized_tiles(128, 1024, 512, "float4_e2m1fn", group=256, exact=True, cluster=1),
    quantized_tiles(64, 10240, 512, "int4", group=128, groups=2, terms=256, exact=True),
    quantized_tiles(64, 3072, 256, "int8", group=64, groups=1, turns=2, terms=256, exact=True),
    quantized_tiles(64, 1024, 1024, "int4", group=128, groups=4, exact=True, activation="silu"),
    quantized_tiles(64, 4608, 768, "float8_e4m3fn", run=64, group=128, groups=2, terms=256,
                    exact=True, cluster=1, activation="gelu_tanh"),
    quantized_tiles(128, 1024, 256, "int8", groups=1, turns=2, activation="silu"),
    quantized_tiles(64, 2048, 512, "int4", group=128, groups=4, exact=True, activation="silu",
                    words=True),
    quantized_tiles(64, 3072, 256, "int4", group=64, groups=2, parts=2, terms=256, exact=True,
                    words=True),
    quantized_tiles(64, 1024, 896, "int4", group=128, groups=4, exact=True, shared=True,
                    activation="silu", words=True),
    quantized_tiles(64, 4608, 1536, "int4", group=128, groups=4, exact=True, num_ctas=2),
    quantized_tiles(64, 2048, 768, "int8", groups=3, cluster=1),
    quantized_tiles(64, 3072, 256, "float8_e4m3fn", run=64, group=64, groups=2, parts=2, terms=256,
                    exact=True),
    quantized_tiles(32, 1024, 640, "int8", groups=3, shared=True),
    quantized_tiles(64, 2048, 768, "int4", group=128, groups=3, parts=4, terms=256, exact=True,
                    words=True),
    quantized_tiles(256, 1024, 2048, "float8_e4m3fn", run=128, group=128, terms=64, num_ctas=6),
    quantized_tiles(256, 1024, 128, "int8", groups=1, turns=2, terms=64, tokens=128),
    *FP8,
    *PAIRS,
    *BANDS,
    writes(1, 8, 2, 128, normed=False), writes(7, 16, 8, 128, normed=True),
    writes(300, 4, 4, 64, normed=True), writes(64, 8, 4, 256, normed=False),
    writes(9, 16, 8, 256, normed=True, one_more=True),
    writes(33, 16, 4, 128, normed=True, parts=4), writes(64, 32, 8, 128, normed=False, parts=2),
    *(draws(8, V, "top-k and top-p", k=50, p=0.95) for V in (50, 1111, 128256, 262208)),
    draws(8, 50257, "temperature"), draws(5, 32000, "min-p", min_p=0.05),
    draws(4, 4096, "top-p", p=0.9), draws(6, 1111, "all", k=300, p=0.9, min_p=0.01),
)  # fmt: skip
BENCH: tuple[Case, ...] = (
    *(Attention(f"{B} x {L}", (1,) * B, (L - 1,) * B).case(decode_attention) for B, L in
      ((1, 1088), (8, 1088), (64, 1088), (256, 1088), (64, 4096))),
    *(Attention(f"{B} x 1024, {Q} tokens", (Q,) * B, (1024 - Q,) * B, query_len=Q)
      .case(decode_attention) for B in (1, 8, 64, 256) for Q in (1, 4)),
    *(Attention(f"1 x 1024 of 8192, {Q} tokens", (Q,), (1024 - Q,), query_len=Q, columns=128)
      .case(decode_attention) for Q in (1, 4)),
    *(Attention(f"256 x 1088, {kv}", (1,) * 256, (1087,) * 256, kv_dtype=kv).case(decode_attention)
      for kv in ("float8_e4m3fn", "int8")),
    *(Attention(f"{B} x {L}", (L,) * B, (0,) * B).case(prefill_attention) for B, L in
      ((8, 4096), (8, 1024), (1, 1024))),
    Attention("4 x 256 upon 3840", (256,) * 4, (3840,) * 4).case(prefill_attention),
    *(latents(Attention(f"{B} x {L}", (1,) * B, (L - 1,) * B), H) for H in (16, 128)
      for B, L in ((1, 4096), (8, 4096), (64, 1024), (64, 4096), (256, 1024))),
    *(norms(T, E) for T, E in ((8, 4096), (8192, 4096))),
    *(products(T, 4096, 6144) for T in (64, 128)),
    *(products(T, 4096, 14336, activation="silu") for T in (64, 128, 256)),
    *(mlps(T, E, F, act) for E, F, act in ((4096, 14336, "silu"), (1024, 3072, "silu"),
      (3840, 15360, "gelu_tanh")) for T in (8, 32, 64)), mlps(128, 1024, 3072),
    *(mixtures(T, 128, 8, 2048, 768, tile=max(8, T // 8)) for T in (1, 8, 64, 256)),
    *(mixtures(T, 64, 6, 1536, 512, tile=max(8, T // 8)) for T in (8, 64)),
    *(routes(T, 128, 8) for T in (8, 128, 256)),
    *(groups(T, 128, 8, 2048, tile=max(8, T // 8)) for T in (8, 128, 256)),
    *(mixtures(T, 32, 4, 2880, 2880, tile=max(8, T // 4), clamped=True) for T in (1, 8, 64)),
    *(quantized_products(T, E, F, code, run=run, group=128, max_parts=parts) for code, run in
      (("float8_e4m3fn", 128), ("int4", 1))
      for E, F, parts in ((4096, 6144, 1), (4096, 4096, 8), (4096, 28672, 1), (14336, 4096, 8))
      for T in (1, 8, 64, 256)),
    *(quantized_mlps(T, 4096, 14336, code, run=run, group=128) for code, run in
      (("float8_e4m3fn", 128), ("int4", 1)) for T in (1, 8, 16)),
    *(fitted_tiles(T, E, F, code, run, in_parts=E == 14336 or F == 4096) for code, run in
      (("float8_e4m3fn", 128), ("int4", 1))
      for E, F in ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)) for T in (64, 256)),
    *(fitted_tiles(T, 4096, 28672, "int4", 1, activation="silu") for T in (64, 256)),
    fitted_tiles(64, 4096, 28672, "int4", 1, activation="silu", words=True),
    fitted_tiles(64, 4096, 6144, "int4", 1, words=True),
    fitted_tiles(64, 14336, 4096, "int4", 1, in_parts=True, words=True),
    *BENCH_FP8,
    *BENCH_PAIRS,
    *BENCH_BANDS,
    full_tiles(1 << 14, 256, 8, 7168, 512), *BENCH_QUANTIZED_MIXTURES,
    *(choices(T, 256, How(8, "sigmoid", True, 8, 4)) for T in (8, 256)),
    *(writes(T, 32, 8, 128, normed=False) for T in (8, 64, 8192)),
    writes(64, 32, 8, 128, normed=False, parts=4),
    *(draws(N, 128256, "top-k and top-p", k=50, p=0.95) for N in (1, 64, 256)),
    draws(256, 128256, "temperature"), *MODELS, *CONVS, *LONG_PROMPTS,
)  # fmt: skip
