"""What kernels must compute, in float64 numpy, a row at a time."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def wide(x) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def one_row(q, keys, values, positions, *, scale, window, soft_cap, sinks):
    """Attends q, [Q, H, D], at `positions` to keys and values, [K, n, D]."""
    Q, H, D = q.shape
    K, n = keys.shape[:2]
    scores = np.einsum("qkgd,knd->qkgn", q.reshape(Q, K, H // K, D), keys) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    seen = np.arange(n)[None] <= positions[:, None]
    if window is not None:
        seen &= np.arange(n)[None] > positions[:, None] - window
    scores = np.where(seen[:, None, None], scores, -np.inf)
    best = scores.max(-1, keepdims=True)
    extra = 0.0
    if sinks is not None:
        sink = np.asarray(sinks, np.float64).reshape(1, K, H // K, 1)
        best = np.maximum(best, sink)
        extra = np.exp(sink - best)
    p = np.exp(scores - best)
    p /= p.sum(-1, keepdims=True) + extra
    return np.einsum("qkgn,knd->qkgd", p, values).reshape(Q, H, D)


def decode_attention(q, k, v, blocks, lens, *more, query_len=1, **options):
    num, *scales = (np.ones_like(lens), *more) if query_len == 1 else more
    # Each token is a row of its own, with the keys that it sees; places without one have none.
    place, lens = np.arange(query_len)[None], np.asarray(lens)[:, None]
    num = np.asarray(num)[:, None]
    seen = np.where(place < num, lens - num + place + 1, 0) * (lens > 0)
    starts = np.arange(len(q) + 1)
    blocks = np.repeat(blocks, query_len, 0)
    return prefill_attention(q, k, v, blocks, starts, seen.ravel(), *scales, **options)


def prefill_attention(q, k, v, blocks, starts, lens, k_scale=1.0, v_scale=1.0, **options):
    q, k, v = wide(q), wide(k), wide(v)
    k, v = k * wide(k_scale)[..., None], v * wide(v_scale)[..., None]
    out, S = np.zeros(q.shape), k.shape[2]
    for b, n in enumerate(np.asarray(lens)):
        if n:
            rows = slice(int(starts[b]), int(starts[b + 1]))
            ids = np.asarray(blocks)[b, : -(-n // S)]
            keys, values = (
                np.moveaxis(x[ids], 1, 0).reshape(k.shape[1], -1, k.shape[3])[:, :n] for x in (k, v)
            )
            positions = n - (rows.stop - rows.start) + np.arange(rows.stop - rows.start)
            out[rows] = one_row(q[rows], keys, values, positions, **options)
    return out


def latent_decode(q, latents, blocks, lens, *, scale, rank):
    rows, none = latents[:, None], dict[str, Any](window=None, soft_cap=None, sinks=None)
    return decode_attention(q, rows, rows, blocks, lens, scale=scale, **none)[..., :rank]


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def add_rms_norm(x, residual, weight, end=None, *, eps, one_more=False):
    # The sum is rounded before it is normed: so says the specification.
    whole = wide(residual) if residual.ndim == 2 else wide(residual).sum(0)
    if end is not None:
        whole = wide(whole.astype(jnp.bfloat16))
        whole = wide(rms_norm(whole, wide(end) + one_more, eps).astype(jnp.bfloat16))
    total = wide((wide(x) + whole).astype(jnp.bfloat16))
    return total, rms_norm(total, wide(weight) + one_more, eps)


def matmul(x, weight):
    return wide(x) @ wide(weight).T


def few_bits(weight, scale, zero=None, *, code):
    """Weights in float64: numbers, less their zero points, times their scales."""
    packed, numbers = np.asarray(weight), wide(weight)
    if code in ("int4", "float4_e2m1fn"):
        halves = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
        table = np.arange(16) - 8.0 if code == "int4" else E2M1
        numbers = table[halves]
    rows, columns = (n // m for n, m in zip(numbers.shape, scale.shape, strict=True))
    exponents = np.asarray(scale).dtype == np.uint8
    scale, zero = (
        np.repeat(np.repeat(s, rows, 0), columns, 1)
        for s in (
            2.0 ** (wide(scale) - 127) if exponents else wide(scale),
            np.zeros(scale.shape) if zero is None else wide(zero),
        )
    )
    return (numbers - zero) * scale


def quantized_matmul(x, weight, scale, zero=None, *, code):
    return wide(x) @ few_bits(weight, scale, zero, code=code).T


def fp8_blocks(x, x_scale, weight, scale):
    whole = wide(x) * np.repeat(wide(x_scale).T, x.shape[1] // x_scale.shape[0], 1)
    return whole @ few_bits(weight, scale, code="float8_e4m3fn").T


def fp8_gates(*args):
    return rounded(gated(fp8_blocks(*args)))


def gated(both):
    return units(*np.split(wide(jnp.asarray(both, jnp.bfloat16)), 2, -1))


def fp8_blocks_of_pairs(x, x_scale, weight, scale):
    rows = fp8_blocks(x, x_scale, weight, scale)
    return rows.reshape(-1, 2, 8, rows.shape[1]).sum(1).reshape(-1, rows.shape[1])


def fp8_gates_of_pairs(*args):
    return gated(fp8_blocks_of_pairs(*args))


def units(gate, unit):
    gate = wide(jnp.asarray(gate / (1 + np.exp(-gate)), jnp.bfloat16))
    return wide(jnp.asarray(gate * unit, jnp.bfloat16))


def fp8_pairs(x):
    return wide(x) if x.ndim == 2 else units(*np.moveaxis(wide(x), 1, 0))


def add_norm_fp8(x, residual, weight, *, eps):
    total, _ = add_rms_norm(x, residual, weight, eps=eps)
    # A norm is rounded before it is multiplied by the weight, which a scale shows.
    normed = wide(jnp.asarray(rms_norm(total, 1, eps), x.dtype)) * wide(weight)
    return total, rounded(wide(jnp.asarray(normed, x.dtype)))


def rounded(x):
    """Rounds x, [T, E], to fp8, 128 terms by a scale of their own."""
    terms = x.reshape(len(x), -1, 128)
    scale = np.maximum(np.abs(terms).max(-1, keepdims=True) / 448, 1e-12)
    return (wide(jnp.asarray(terms / scale, jnp.float8_e4m3fn)) * scale).reshape(x.shape)


def quantized_mlp(x, gate_up, gate_up_scale, down, down_scale, *, code):
    both = quantized_matmul(x, gate_up, gate_up_scale, code=code)
    gate, up = np.split(both, 2, -1)
    units = wide(jnp.asarray(gate / (1 + np.exp(-gate)) * up, x.dtype))
    return units @ few_bits(down, down_scale, code=code).T


def quantized_tile(x, weight, scale, *, code, activation=None):
    y = quantized_matmul(x, weight, scale, code=code)
    if activation is None:
        return y
    gate, up = np.split(y, 2, -1)
    return unit(gate, up, activation)


add_norm_pairs = add_norm_bands = add_rms_norm
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def glu(x, gate_up, *, activation):
    gate, up = (matmul(x, part) for part in gate_up)
    return unit(gate, up, activation)


def unit(gate, up, activation):
    if activation == "gelu_tanh":
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        return gate * (1 + np.tanh(inner)) / 2 * up
    return gate / (1 + np.exp(-gate)) * up


def gated_mlp(x, gate_up, down, *, activation):
    return glu(x, gate_up, activation=activation) @ wide(down).T


def lora_shrink(x, a, place):
    return np.stack([
        np.zeros(a.shape[0] * a.shape[2]) if p == 0 else np.concatenate(wide(a)[:, p - 1] @ row)
        for row, p in zip(wide(x), np.asarray(place), strict=True)
    ])  # fmt: skip


def lora_expand(y, low, b, place, *, whole=False):
    out, low = wide(y), wide(low).sum(0)
    out = out.sum(0) if whole and out.ndim == 3 else out
    for t, p in enumerate(np.asarray(place)):
        if p:
            own = np.split(low[t], len(b))
            more = [part @ w for part, w in zip(own, wide(b)[:, p - 1], strict=True)]
            (out if out.ndim == 2 else out[0])[t] += np.concatenate(more)
    return out


def add_norm_adapted(x, residual, weight, low, b, place, *, eps):
    residual = lora_expand(residual, low, wide(b)[None], place)
    return add_rms_norm(x, residual, weight, eps=eps)


def lora_units(y, low, b, place):
    gate, up = np.split(lora_expand(y.reshape(len(y), -1), low, b, place), 2, 1)
    return gate / (1 + np.exp(-gate)) * up


def prefill_units(y, low, b, place):
    return lora_units(y, low[None], b, place)


def rope_write(qkv, cos, sin, k, v, at, q_norm=None, k_norm=None, *, eps, one_more=False,
               dtype=None):  # fmt: skip
    heads, cos, sin = wide(qkv), wide(cos), wide(sin)
    heads = heads if dtype is None else heads.sum(0)
    q, new_k, new_v = heads[:, :, :-2], heads[:, :, -2], heads[:, :, -1]
    if q_norm is not None:
        q, new_k = (rms_norm(x, wide(w) + one_more, eps) for x, w in ((q, q_norm), (new_k, k_norm)))

    def turn(x, cos, sin):
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    k, v, S = wide(k).copy(), wide(v).copy(), k.shape[2]
    turned = turn(new_k, cos, sin)
    for t, index in enumerate(np.asarray(at)):
        if index < k.shape[0] * S:
            k[index // S, :, index % S], v[index // S, :, index % S] = turned[t], new_v[t]
    T, K, G, D = q.shape
    return turn(q, cos[:, None], sin[:, None]).reshape(T, K * G, D), k, v


def grouped_mlp(x, logits, real, gate_up, down, gate_up_bias=0.0, down_bias=0.0, *, k,
                activation="swiglu"):  # fmt: skip
    x, logits, gate_up, down = map(wide, (x, logits, gate_up, down))
    gate_up_bias = wide(gate_up_bias) + np.zeros(gate_up.shape[:3])
    down_bias = wide(down_bias) + np.zeros(down.shape[:2])
    out = np.zeros(x.shape)
    for t in np.flatnonzero(np.asarray(real)):
        experts = np.argsort(-logits[t], kind="stable")[:k]
        mass = np.exp(logits[t, experts] - logits[t].max())
        for e, share in zip(experts, mass / mass.sum(), strict=True):
            gate, up = gate_up[e] @ x[t] + gate_up_bias[e]
            if activation == "clamped_swiglu":  # gpt-oss
                gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
                units = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            else:
                units = gate / (1 + np.exp(-gate)) * up
            out[t] += share * (down[e] @ wide(jnp.bfloat16(units)) + down_bias[e])
    return out


def quantized_grouped(x, logits, real, *arrays, k, code, names, activation):
    shapes = (logits.shape[1], 2, -1, x.shape[1]), (logits.shape[1], x.shape[1], -1)
    weights, biases = [], []
    for part, shape in zip((arrays[: len(names)], arrays[len(names) :]), shapes, strict=True):
        w = dict(zip(names, part, strict=True))
        bias = wide(w.pop("bias", np.zeros((len(w["weight"]), 1))))
        weights.append(few_bits(**w, code=code).reshape(shape))
        biases.append(bias.reshape(weights[-1].shape[:-1]))
    args = x, logits, real, *weights, *biases
    return grouped_mlp(*args, k=k, activation=activation)
