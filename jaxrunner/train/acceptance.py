"""How many drafts of a head a target would take, after each token of a text."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.linear import Linear
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.llama import Params, llama
from jaxrunner.speculators import eagle3_head as eagle3
from jaxrunner.speculators.eagle3_config import Eagle3Config
from jaxrunner.train.chain import chained
from jaxrunner.types import Array, Inputs

EVAL_BATCH = 8  # windows


class Pair(NamedTuple):
    """A head and its target, as they are compiled in."""

    target: DecoderConfig
    head: Eagle3Config


def read_states(
    pair: Pair, params: Params, given: tuple[Array, Array], kept: Any, batch_size: int
) -> tuple[tuple[Array, ...], Array, Any]:
    """Runs the target on a step of chains. given: tokens and their positions, [T] each.

    Returns the states that the head reads, [T, E] each, logits, [T, V], and the layers' caches.
    """
    tokens, positions = given
    inputs = Inputs(tokens, positions, jnp.full_like(positions, pair.target.longest_len))
    kept = (None,) * pair.target.num_hidden_layers if kept is None else kept
    x, extras = llama.embed(pair.target, params, inputs), _extras(pair.head)
    hidden, kept, found = llama.layers(
        pair.target, params, x, kept, inputs, chained(batch_size), extras=extras
    )
    aux = tuple(found[name] for name in extras)
    return aux, llama.logits(pair.target, params, hidden), kept


def head_of(target: Params) -> Linear:
    """Returns what a target's logits are products with."""
    return Linear(target.embed, None) if target.head is None else target.head


def _extras(head: Eagle3Config) -> tuple[str, ...]:
    return tuple(f"residual.{i}" for i in head.aux_layers)


def acceptance(
    pair: Pair, params: tuple[Params, eagle3.Params], windows: np.ndarray,
    *, num_drafts: int = 3, temperature: float = 0.0, seed: int = 0,
) -> np.ndarray:  # fmt: skip
    """Returns the share of chains whose first 1, 2, ... drafts all stand, [N, num_drafts].

    A chain leaves a window, of [N, L] tokens, behind each of them but the first. The head reads the
    target's true states up to there, then its own; the target reads the drafts too, so a draft
    stands if the target would give it. Both draw a place's token with the same noise. The head has
    the target's vocabulary and embedding. params: of target and head.
    """
    (N, L), key, how = windows.shape, jax.random.key(seed), (num_drafts, temperature)
    padded = np.pad(windows, ((0, -N % EVAL_BATCH), (0, 0)))  # one program for all
    parts = [
        _stood(pair, how, params, padded[i : i + EVAL_BATCH], jax.random.fold_in(key, i))
        for i in range(0, N, EVAL_BATCH)
    ]
    return np.concatenate(jax.device_get(parts))[:N] / (L - 1)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _stood(pair: Pair, how: tuple[int, float], params: Any, windows: Array, key: Array) -> Array:
    """Counts the chains whose first drafts stand, [B, num_drafts], of windows, [B, L]."""
    (target, head), (num_drafts, temperature), (B, L) = params, how, windows.shape
    noise = None
    if temperature:
        V = pair.target.vocab_size
        noise = temperature * jax.random.gumbel(key, (B, L + num_drafts, V))

    def draw(scores: Array, step: int) -> Array:
        """Draws behind each place of a text; chains of `step` tokens are so much further on."""
        scores = scores.astype(jnp.float32).reshape(B, L, -1)
        return jnp.argmax(scores if noise is None else scores + noise[:, step : step + L], -1)

    positions = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32)[None], (B, L)).reshape(-1)
    tokens, kept, cache, counts = windows.astype(jnp.int32), None, None, []
    stood, ops = jnp.ones((B, L - 1), jnp.bool), chained(B)
    aux, scores, kept = read_states(pair, target, (tokens.reshape(-1), positions), kept, B)
    x, given = eagle3.feature(pair.head, head, aux), jnp.roll(tokens, -1, 1)
    for step in range(num_drafts):
        wanted = draw(scores, step)[:, 1:]  # behind the token that the head was given
        at = positions + step
        inputs = Inputs(given.reshape(-1), at, jnp.full_like(at, pair.target.longest_len))
        embeddings = llama.embed(pair.target, target, inputs)
        hidden, x, cache = eagle3.layers(pair.head, head, embeddings, x, cache, inputs, ops)
        logits = eagle3.logits(pair.head, head, head_of(target), hidden).reshape(B, L, -1)
        # Drawn with the noise of the place that its draft would take, one further than its own.
        ahead = jnp.roll(logits, 1, 1)
        drafts = jnp.roll(draw(ahead, step), -1, 1).astype(jnp.int32)
        stood &= drafts[:, :-1] == wanted
        counts.append(stood.sum(1))
        given = drafts
        if step + 1 < num_drafts:
            after = jnp.roll(drafts, 1, 1).reshape(-1), at + 1
            _, scores, kept = read_states(pair, target, after, kept, B)
    return jnp.stack(counts, 1)


def mean_length(rates: np.ndarray) -> float:
    """Returns the mean tokens of a step, of rates, [num_drafts] or of each window.

    They are the drafts that stand, and one of the target's own.
    """
    return 1.0 + float(np.mean(rates.sum(-1)))
