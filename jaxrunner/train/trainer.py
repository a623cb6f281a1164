"""The training loop: AdamW on random windows of a token stream, through the model's `forward`."""

from collections.abc import Callable
import dataclasses
from dataclasses import dataclass
import functools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np
import optax

from jaxrunner import pytree
from jaxrunner.config import ModelConfig
from jaxrunner.models.llama import llama
from jaxrunner.ops.backends import dense
from jaxrunner.types import Array, Inputs

EVAL_BATCH = 16  # windows


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained. The corpus is small: what keeps it from being learnt by heart
    (weight decay, dropout, the average of weights, early stopping) matters most.
    """

    steps: int = 2000
    batch: int = 16  # windows of a step
    length: int = 2048  # tokens of a window
    peak_rate: float = 3e-3
    warmup: int = 100  # steps
    weight_decay: float = 1.0
    dropout: float = 0.15  # of heads' channels and of MLP units, one mask a window
    clip: float = 1.0  # global norm of gradients
    average: float = 0.99  # decay of the running average of weights, which is what is kept
    eval_every: int = 100  # steps
    patience: int = 15  # evaluations without a better one before training ends
    budget_s: float = 1e9
    dtype: str = "float32"  # of the computation; master weights are float32
    seed: int = 0


class Training(NamedTuple):
    """All that a step changes. Donated to every step."""

    params: Any
    optimizer: Any
    average: Any


class Result(NamedTuple):
    """The result of training."""

    params: Any  # float32, the average of weights that scored best
    curve: list[dict[str, float]]  # one entry an evaluation
    best: dict[str, float]  # entry of `curve` that `params` belongs to


def fit(
    config: ModelConfig,
    train: TrainConfig,
    stream: tuple[np.ndarray, np.ndarray],
    held_out: np.ndarray,
    report: Callable[[str], None] = print,
) -> Result:
    """Trains on windows of a stream until `held_out`, [M], gets no better.

    stream: its tokens, [N], and the places in it where a passage begins.
    """
    state = init(config, train)
    tokens, curve, losses = jax.tree.map(jnp.asarray, stream), [], []
    best: dict[str, float] = {"held_out_loss": math.inf}
    params, began = state.params, time.monotonic()
    for index in range(1, train.steps + 1):
        state, loss = step(config, train, state, tokens, jnp.asarray(index, jnp.int32))
        losses.append(loss)
        if index % train.eval_every and index < train.steps:
            continue
        late = time.monotonic() - began > train.budget_s
        scored = evaluate(config, state.average, held_out, train.length, dtype=train.dtype)
        curve.append(
            dict(
                step=index,
                seconds=round(time.monotonic() - began, 2),
                train_loss=round(float(np.mean(jax.device_get(losses))), 4),
                held_out_loss=round(float(scored.mean()), 4),
            )
        )
        report(" ".join(f"{k} {v}" for k, v in curve[-1].items()))
        losses = []
        if curve[-1]["held_out_loss"] < best["held_out_loss"]:
            best, params = curve[-1], jax.device_get(state.average)
        if late or len(curve) - 1 - curve.index(best) >= train.patience:
            break
    return Result(params, curve, best)


def init(config: ModelConfig, train: TrainConfig) -> Training:
    """Returns random weights and an optimizer's zeros."""
    count = iter(range(1 << 30))

    def make(axes: str, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        key = jax.random.fold_in(jax.random.key(train.seed), next(count))
        if len(axes) == 1:
            return jnp.ones(shape, dtype)
        if axes[0] == "V":
            return 0.02 * jax.random.normal(key, shape, dtype)
        # The addend of a layer to the stream (axes "E ...") is scaled down by the number of layers.
        adds = axes[0] == "E"
        fan_in = np.prod(shape[1:]) if adds else shape[-1]
        gain = (2 * config.num_hidden_layers) ** -0.5 if adds else 1.0
        return float(gain * fan_in**-0.5) * jax.random.normal(key, shape, dtype)

    params = pytree.build(make, llama.params, config.dims | {"param": jnp.float32})
    average = jax.tree.map(jnp.copy, params)
    return Training(params, adamw(train).init(params), average)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def step(
    config: ModelConfig, train: TrainConfig, state: Training, stream: Any, index: Array
) -> tuple[Training, Array]:
    """Takes one step on random windows of the stream; returns the state and the mean loss."""
    start_key, drop_key = jax.random.split(jax.random.fold_in(jax.random.key(train.seed), index))
    tokens, openings = stream
    windows = _windows(train, tokens, openings, start_key)

    def mean_loss(params: Any) -> Array:
        params = jax.tree.map(lambda p: p.astype(train.dtype), params)

        def one(window: Array, key: Array) -> Array:
            return token_losses(config, thinned(params, key, train.dropout), window)

        return jax.vmap(one)(windows, jax.random.split(drop_key, train.batch)).mean()

    loss, grads = jax.value_and_grad(mean_loss)(state.params)
    updates, optimizer = adamw(train).update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    seen = index.astype(jnp.float32)
    decay = jnp.minimum(train.average, (1 + seen) / (10 + seen))
    average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state.average, params)
    return Training(params, optimizer, average), loss


def _windows(train: TrainConfig, stream: Array, openings: Array, key: Array) -> Array:
    """Returns random windows, [batch, length + 1]; every other one opens a passage.

    Such a one begins with token 0, as a prompt does, and then a line that is not indented: without
    it the model cannot know how deep the first line of a prompt is.
    """
    any_key, opening_key = jax.random.split(key)
    shape, last = (train.batch,), stream.shape[0] - train.length
    start = jax.random.randint(any_key, shape, 0, last)
    opening = openings[jax.random.randint(opening_key, shape, 0, openings.shape[0])]
    opens = jnp.arange(train.batch) % 2 == 0
    # One token before the passage stands where token 0 goes.
    start = jnp.where(opens, jnp.minimum(opening, last) - 1, start)
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, stream, slice_size=train.length + 1)
    windows = jax.vmap(cut)(start)
    return windows.at[:, 0].set(jnp.where(opens, 0, windows[:, 0]))


def token_losses(config: ModelConfig, params: Any, window: Array) -> Array:
    """Returns the loss in nats, [L], of each token of window, [L + 1], after the first."""
    tokens, targets = window[:-1], window[1:]
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    inputs = Inputs(tokens, positions, jnp.full_like(positions, tokens.shape[0]))
    caches = (None,) * config.num_hidden_layers
    ops = dense(1)
    hidden, _ = llama.forward(config, params, caches, inputs, ops)
    scores = llama.logits(config, params, hidden)
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets)


def thinned(params: Any, key: Array, rate: float) -> Any:
    """Drops heads' channels and MLP units, by their weights: `forward` needs no dropout of its own.

    One mask serves all tokens of a sequence. arXiv:1512.05287.
    """
    if rate == 0:
        return params

    def mask(key: Array, weight: Array) -> Array:
        kept = jax.random.bernoulli(key, 1 - rate, (1, *weight.shape[1:]))
        return weight * jnp.broadcast_to(kept, weight.shape).astype(weight.dtype) / (1 - rate)

    def thin(layer: Any, key: Array) -> Any:
        o_key, down_key = jax.random.split(key)
        o, down = mask(o_key, layer.o.weight), mask(down_key, layer.down.weight)
        return dataclasses.replace(
            layer,
            o=dataclasses.replace(layer.o, weight=o),
            down=dataclasses.replace(layer.down, weight=down),
        )

    keys = jax.random.split(key, len(params.layers))
    layers = tuple(thin(layer, key) for layer, key in zip(params.layers, keys, strict=True))
    return dataclasses.replace(params, layers=layers)


def evaluate(
    config: ModelConfig, params: Any, stream: np.ndarray, length: int, *, dtype: str = "float32"
) -> np.ndarray:
    """Returns the loss in nats of each token of stream, [M], after the first: [M - 1].

    Windows of `length` tokens follow each other; a token sees those before it in its window.
    """
    count = -(-(len(stream) - 1) // length)
    padded = np.zeros(count * length + 1, np.int32)
    padded[: len(stream)] = stream
    windows = np.stack([padded[i * length : (i + 1) * length + 1] for i in range(count)])
    params = jax.tree.map(lambda p: jnp.asarray(p).astype(dtype), params)
    parts = [windows[i : i + EVAL_BATCH] for i in range(0, count, EVAL_BATCH)]
    losses = [np.asarray(_losses(config, params, part)) for part in parts]
    return np.concatenate(losses).reshape(-1)[: len(stream) - 1]


@functools.partial(jax.jit, static_argnums=0)
def _losses(config: ModelConfig, params: Any, windows: Array) -> Array:
    return jax.vmap(functools.partial(token_losses, config, params))(windows)


def adamw(train: Any) -> optax.GradientTransformation:
    """Returns AdamW with a warm-up, a cosine and clipped gradients, by their global norm; matrices
    alone decay. train: has the fields of `TrainConfig` that are read here."""
    steps, peak = max(train.steps, train.warmup + 1), train.peak_rate
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, train.warmup, steps, 0.02 * peak)

    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    adam = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=train.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(train.clip), adam)
