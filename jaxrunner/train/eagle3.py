"""Trains an EAGLE-3 head by training-time test: its steps read what it gave, not the truth.

arXiv:2503.01840. The target is frozen, and run again in each step: it is small. The head has the
target's embedding, vocabulary and logits.
"""

from collections.abc import Callable
import dataclasses
from dataclasses import dataclass
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from jaxrunner import pytree
from jaxrunner.models.llama import Params, llama
from jaxrunner.speculators import eagle3_head as eagle3
from jaxrunner.train.acceptance import Pair, acceptance, head_of, mean_length, read_states
from jaxrunner.train.chain import chained
from jaxrunner.train.trainer import adamw
from jaxrunner.types import Array, Inputs


@dataclass(frozen=True)
class HeadTraining:
    """How a head is trained."""

    steps: int = 4000
    batch: int = 8  # windows of a step
    length: int = 1024  # tokens of a window: serving has long texts, so attention must learn them
    unroll: int = 4  # drafts of a chain
    decay: float = 0.8  # weight of a draft's loss against the one before
    peak_rate: float = 2e-3
    warmup: int = 100  # steps
    weight_decay: float = 0.1
    clip: float = 0.5  # global norm of gradients
    eval_every: int = 400  # steps
    budget_s: float = 1e9  # of the whole command; training ends at the first evaluation behind it
    dtype: str = "float32"  # of the computation; master weights are float32
    seed: int = 0


class State(NamedTuple):
    """All that a step changes. Donated to every step."""

    params: Any  # of the head
    optimizer: Any


class Trained(NamedTuple):
    """The result of training."""

    params: eagle3.Params  # float32, those with the greatest acceptance length
    curve: list[dict[str, Any]]  # one entry an evaluation
    best: dict[str, Any]  # entry of `curve` that `params` belong to


def fit(
    pair: Pair, target: Params, train: HeadTraining, rows: np.ndarray, held_out: np.ndarray,
    *, report: Callable[[str], None] = print, began: float | None = None,
) -> Trained:  # fmt: skip
    """Trains on random windows of rows, [N, row_len]; held_out, [N, L]: measures acceptance there.

    began: `time.monotonic()` from which the budget counts.
    """
    start = time.monotonic()
    began = start if began is None else began
    fixed = jax.tree.map(lambda p: jnp.asarray(p, train.dtype), target)
    exact = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), target)
    state, tokens = init(pair, train, target), jnp.asarray(rows, jnp.int32)
    kept, best, curve, losses = state.params, {"length": 0.0}, [], []
    for index in range(1, train.steps + 1):
        state, loss = step(pair, train, state, (fixed, tokens), jnp.asarray(index, jnp.int32))
        losses.append(loss)
        if index % train.eval_every and index < train.steps:
            continue
        rates = acceptance(pair, (exact, state.params), held_out).mean(0)
        seen, losses = np.mean(jax.device_get(losses), 0), []
        curve.append(
            dict(
                step=index,
                seconds=round(time.monotonic() - start, 2),
                train_loss=round(float(seen[0]), 4),
                loss_of_draft=[round(float(x), 4) for x in seen[1:]],
                greedy=rates.round(4).tolist(),
                length=round(mean_length(rates), 4),
            )
        )
        report(" ".join(f"{k} {v}" for k, v in curve[-1].items()))
        if curve[-1]["length"] > best["length"]:
            best, kept = curve[-1], jax.device_get(state.params)
        if time.monotonic() - began > train.budget_s:
            break
    return Trained(kept, curve, best)


def init(pair: Pair, train: HeadTraining, target: Params) -> State:
    """Returns random weights and an optimizer's zeros; the last norm is the target's."""
    count = iter(range(1 << 30))

    def make(axes: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        key = jax.random.fold_in(jax.random.key(train.seed), next(count))
        if len(shape) == 1:
            return jnp.ones(shape, dtype)
        fan_in = np.prod(shape[1:]) if axes[0] == "E" else shape[-1]
        return float(fan_in) ** -0.5 * jax.random.normal(key, shape, dtype)

    params = pytree.build(make, eagle3.Params, pair.head.dims | {"param": jnp.float32})
    # The target's logits read what it gives. A copy, because steps consume it.
    norm = jnp.array(target.norm, jnp.float32)
    params = dataclasses.replace(params, norm=norm)
    return State(params, adamw(train).init(params))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def step(
    pair: Pair, train: HeadTraining, state: State, given: tuple[Params, Array], index: Array
) -> tuple[State, Array]:
    """Takes one step. given: the target, and rows, [N, row_len].

    Returns the state, and the weighted mean loss with that of each draft behind it, in nats.
    """
    target, rows = given
    row_key, start_key = jax.random.split(jax.random.fold_in(jax.random.key(train.seed), index))
    which = jax.random.randint(row_key, (train.batch,), 0, rows.shape[0])
    last = rows.shape[1] - train.length
    starts = jax.random.randint(start_key, (train.batch,), 0, last + 1)
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=train.length)
    windows = jax.vmap(cut)(rows[which], starts)

    def weighted(params: eagle3.Params) -> tuple[Array, Array]:
        params = jax.tree.map(lambda p: p.astype(train.dtype), params)
        losses = draft_losses(pair, (target, params), windows, train.unroll)
        weights = train.decay ** jnp.arange(train.unroll, dtype=jnp.float32)
        return (losses * weights).sum() / weights.sum(), losses

    (loss, losses), grads = jax.value_and_grad(weighted, has_aux=True)(state.params)
    updates, optimizer = adamw(train).update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    return State(params, optimizer), jnp.concatenate([loss[None], losses])


def draft_losses(
    pair: Pair, params: tuple[Params, eagle3.Params], windows: Array, unroll: int
) -> Array:
    """Returns the mean loss of each draft of a chain, [unroll], over windows, [B, L].

    It is the cross-entropy to the target's probabilities, in nats. params: of target and head.
    """
    (target, head), (B, L) = params, windows.shape
    positions = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32)[None], (B, L)).reshape(-1)
    aux, scores, _ = read_states(pair, target, (windows.reshape(-1), positions), None, B)
    wanted = jax.nn.softmax(scores.astype(jnp.float32), -1).reshape(B, L, -1)
    aux, wanted = jax.lax.stop_gradient((aux, wanted))
    x, cache, losses, ops = eagle3.feature(pair.head, head, aux), None, [], chained(B)
    for i in range(unroll):
        at = positions + i
        tokens = jnp.roll(windows, -1 - i, 1).reshape(-1)
        inputs = Inputs(tokens, at, jnp.full_like(at, pair.target.longest_len))
        embeddings = llama.embed(pair.target, target, inputs)
        hidden, x, cache = eagle3.layers(pair.head, head, embeddings, x, cache, inputs, ops)
        given = eagle3.logits(pair.head, head, head_of(target), hidden).reshape(B, L, -1)
        # Its last places would read, or be asked for, what lies behind the window.
        given, asked = given[:, : L - 1 - i].astype(jnp.float32), wanted[:, 1 + i :]
        losses.append(-(asked * jax.nn.log_softmax(given, -1)).sum(-1).mean())
    return jnp.stack(losses)
