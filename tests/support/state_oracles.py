"""What kernels of recurrent states compute, in float64: one token after the other."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.support.oracles import wide


def state_step(states, source, place, start, num, waiting, *given, axis, fields):
    """Matrices lie with keys behind values here, and heads have keys of their own."""
    given = [wide(x) for x in given]
    tokens, replayed = given[:fields], given[fields:]
    replays = len(replayed[0]) // len(num) if replayed else 0
    dtype, times = states.dtype, states.shape[1] // tokens[1].shape[1]
    held, out = wide(states).copy(), np.zeros(tokens[0].shape)
    old = held.copy()
    if replayed:  # behind the others; what they read is nobody's
        again = [*replayed[:2], np.zeros_like(replayed[1]), *replayed[2:]]
        tokens = [np.concatenate(pair) for pair in zip(tokens, again, strict=True)]
    named: list[Any] = [*tokens, *[None] * (5 - fields)]
    value, key, query, keep, beta = named
    key, query = (np.repeat(x, times, 1) for x in (key, query))
    for b, n in enumerate(np.asarray(num)):
        if not n:
            continue
        s = old[source[b]] if source[b] < len(old) else np.zeros(old.shape[1:])
        first = [len(out) + b * replays + k for k in range(int(waiting[b]))]
        for t in (*first, *range(start[b], start[b] + n)):
            s = (s if axis else s.swapaxes(1, 2)) * keep[t][:, None, None]
            moved = value[t]
            if beta is not None:
                moved = beta[t][:, None] * (moved - np.einsum("hxy,hy->hx", s, key[t]))
            s = s + np.einsum("hx,hy->hxy", moved, key[t])
            if t < len(out):
                out[t] = np.einsum("hxy,hy->hx", s, query[t])
            # Rounded before the next token: so says the specification.
            s = wide(jnp.asarray(s if axis else s.swapaxes(1, 2), jnp.float32).astype(dtype))
            if t == start[b]:
                for at in np.asarray(place[b]):
                    held[at : at + 1] = s  # nothing behind the last
    return out, held


def state_chunks(states, source, place, start, num, chunk, value, key, query, decay, beta, *, axis):
    """A token after the other; states are rounded behind each chunk of 64."""
    value, key, query, decay, beta = map(wide, (value, key, query, decay, beta))
    times = states.shape[1] // key.shape[1]
    key, query = (np.repeat(x, times, 1) for x in (key, query))
    held, out = wide(states).copy(), np.zeros((len(decay), *value.shape[1:]))
    old = held.copy()
    for b, n in enumerate(np.asarray(num)):
        if not n:
            continue
        s = old[source[b]] if source[b] < len(old) else np.zeros(old.shape[1:])
        s = s.swapaxes(1, 2) if axis else s
        for nth, t in enumerate(range(start[b], start[b] + n)):
            s = s * np.exp(decay[t])[:, None, None]
            moved = value[t]
            if not axis:
                moved = beta[t][:, None] * (moved - np.einsum("hyx,hy->hx", s, key[t]))
            s = s + np.einsum("hx,hy->hyx", moved, key[t])
            out[t] = np.einsum("hyx,hy->hx", s, query[t])
            if nth % 64 == 63 or nth == n - 1:
                s = wide(jnp.asarray(s, jnp.float32).astype(states.dtype))
        held[place[b]] = s.swapaxes(1, 2) if axis else s
    return out, held
