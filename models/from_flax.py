"""Decoders written in flax as models, and weights of ours as an nnx state.

graphdef, params = nnx.split(decoder)
model = from_nnx(graphdef, params, config)
engine = Engine(model, config, EngineConfig(...), params)

A decoder gives its attention away: it calls `attend`, and the engine keeps the keys and values.
`Decoder` says what else it must be.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import functools
from typing import Any, NoReturn, Protocol, TypeVar

from flax import linen, nnx
import jax
from jax.extend.core import get_opaque_trace_state
import jax.numpy as jnp

from jaxrunner import pytree
from jaxrunner.caches.cache_group import layer_groups
from jaxrunner.model import AttentionSpec, Model, Ops
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.rope import rotation
from jaxrunner.ops.backends import dense
from jaxrunner.ops.plain import rotate as rotate_heads
from jaxrunner.types import Array, Inputs, LayerCache

Weights = TypeVar("Weights")
TRIED = 3  # tokens that a module is tried with, none of them real


@dataclass(frozen=True, eq=False)
class Attend:
    """Causal attention of each layer in turn, over the tokens before it too."""

    config: DecoderConfig
    inputs: Inputs
    ops: Ops
    kv: tuple[LayerCache | None, ...]
    caches: list[LayerCache | None]  # of the layers so far: grows while a module is traced
    trace: Any  # in which `caches` lives

    def __call__(self, q: Array, k: Array, v: Array, *, rotate: bool = False) -> Array:
        """Returns the attended values, [T, H, D], of q, [T, H, D], and k and v, [T, K, D].

        Query heads h * H / K and on share KV head h. Scores are scaled by D**-0.5: for another
        scale, multiply q. With `rotate`, q and k are turned by their positions as `config.rope`
        says; without, they are taken as they are.

        Raises:
          ValueError: a shape or dtype that the cache does not hold, a layer too many, or a call
            from within a transformation; says where.
        """
        c, layer, T = self.config, len(self.caches), self.inputs.positions.shape[0]
        H, K, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        if layer == len(self.kv):
            raise ValueError(
                f"attend must be called num_hidden_layers={layer} times, got one call more: call "
                "it once in each layer, or correct num_hidden_layers"
            )
        if get_opaque_trace_state() != self.trace:
            raise ValueError(
                f"attend must be called outside of transformations, layer {layer} is inside one "
                "(scan, remat, jit, vmap), which its cache cannot leave: call the layers one by "
                "one in a Python loop"
            )
        for name, x, heads in (("q", q, H), ("k", k, K), ("v", v, K)):
            cure = "split its heads, or correct the number of heads and head_dim of the config"
            _expect(f"{name} of layer {layer}", x, (T, heads, D), cure)
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(
                f"q, k and v of layer {layer} must have one dtype, got {q.dtype}, {k.dtype} and "
                f"{v.dtype}: cast them to the engine's"
            )
        spec = AttentionSpec(layer_groups(c.cache_kinds)[layer], c.windows[layer], D**-0.5)
        if rotate:
            turn = rotation(c.rope, self.inputs)
            q, k = rotate_heads(q, *turn), rotate_heads(k, *turn)
        out, cache = self.ops.attend(q, k, v, self.kv[layer], spec)
        self.caches.append(cache)
        return out


class Decoder(Protocol):
    """The interface of a module that can be served.

    The tokens of all requests, and padding, lie side by side along T: nothing but `attend` may mix
    them. What a call writes into variables is dropped. A linen module gets no random keys, so its
    dropout must be off.
    """

    def __call__(self, token_ids: Array, positions: Array, attend: Attend) -> Array:
        """Returns hidden states, [T, E], in the engine's dtype; token_ids and positions are [T].

        Calls `attend` once in each layer, the first one first.
        """
        ...

    def logits(self, hidden: Array) -> Array:
        """Scores every token of the vocabulary: hidden [..., E] -> [..., V].

        They are cast to the dtype of `hidden`.
        """
        ...


@pytree.pytree
class Undeclared:
    """Stands for the axes of a module's params, which flax alone knows."""

    def __post_init__(self) -> None:
        raise ValueError(
            "params of a flax model declare no axes, so none can be made from its config: "
            "initialise the module with flax"
        )


def from_nnx(graphdef: nnx.GraphDef[Any], params: Any, config: DecoderConfig) -> Model:
    """Returns the model of an nnx module, a `Decoder`, that `nnx.split` has split.

    params: what the engine is given, its state: an `nnx.State` or a pure dict, of arrays or shapes.
    Of `config` count the number of layers and heads, `head_dim`, `hidden_size`, `vocab_size`,
    `windows` and `rope`. The model has no `read` and no `sources`: no checkpoint is loaded or
    saved with it, and its `params` are never random.

    Raises:
      ValueError: the module is no such decoder, or differs from `config`; says where.
    """
    return _model(functools.partial(_call_nnx, graphdef), params, config)


def from_linen(module: linen.Module, params: Any, config: DecoderConfig) -> Model:
    """Returns the model of a linen module, a `Decoder`; params are its variables.

    `init` needs an `attend`, which `uncached` makes, and a method that calls `logits` too. All else
    is as for `from_nnx`.
    """
    return _model(functools.partial(_call_linen, module), params, config)


def uncached(config: DecoderConfig, positions: Array, *, batch_size: int = 1) -> Attend:
    """Returns the `attend` of one call outside of an engine: to initialise, train or look into.

    positions: [T], of `batch_size` sequences of equal length. Each call needs a new one, made
    inside the transformation, such as `jax.grad`, that the call is in.
    """
    length = jnp.full_like(positions, positions.shape[0] // batch_size)
    none = (None,) * config.num_hidden_layers
    return _attend(config, Inputs(positions, positions, length), dense(batch_size), none)


def to_nnx_state(params: Any) -> nnx.State:
    """Returns params as `nnx.Param`s, each at its own path:
    state["layers"][0]["qkv"]["weight"].

    A module whose attributes have these names, its layers an `nnx.List`, takes them by
    `nnx.update`. Nothing is copied; weights that a model does not have are absent.
    """
    leaves = jax.tree.leaves_with_path(params)
    return nnx.from_flat_state([(_names(path), nnx.Param(leaf)) for path, leaf in leaves])


def from_nnx_state(
    state: nnx.State, params_type: type[Weights], dims: Mapping[str, Any]
) -> Weights:
    """Returns the params that `to_nnx_state` made a state of. Nothing is copied.

    dims: of the model's config, and "param", their dtype.

    Raises:
      ValueError: a weight is missing, of another shape or dtype, or not ours; names it.
    """
    found = jax.tree.leaves_with_path(nnx.to_pure_dict(state))
    got = {_names(path): leaf for path, leaf in found}
    wanted, treedef = jax.tree.flatten_with_path(pytree.abstract(params_type, dims))
    want = [_names(path) for path, _ in wanted]
    missing, extra = set(want) - set(got), set(got) - set(want)
    if missing or extra:
        raise ValueError(
            f"state must hold the weights of {params_type.__name__}: {_listed(missing)} missing, "
            f"{_listed(extra)} unknown: rename them, and take nnx.state(module, nnx.Param)"
        )
    params = jax.tree.unflatten(treedef, [got[names] for names in want])
    pytree.check(params, dims)
    return params


def _model(call: Callable[..., Any], params: Any, config: DecoderConfig) -> Model:
    """Returns a model, tried once without data. call: (method, params, *args)."""
    # Partials are of no module of ours, so the disk keeps no programs of code it cannot tell apart.
    layers, logits = functools.partial(_layers, call), functools.partial(_logits, call)
    model = Model(_no_checkpoint, Undeclared, _embed, layers, logits, _no_checkpoint)
    jax.eval_shape(functools.partial(_try, model, config), params)
    return model


def _try(model: Model, config: DecoderConfig, params: Any) -> Array:
    zeros = jnp.zeros(TRIED, jnp.int32)
    none = (None,) * config.num_hidden_layers
    hidden, _ = model.forward(config, params, none, Inputs(zeros, zeros, zeros), dense(1))
    return model.logits(config, params, hidden)


def _call_nnx(graphdef: nnx.GraphDef[Any], method: str, params: Any, *args: Any) -> Any:
    return getattr(nnx.merge(graphdef, params), method)(*args)


def _call_linen(module: linen.Module, method: str, params: Any, *args: Any) -> Any:
    return module.apply(params, *args, method=method)


def _embed(config: DecoderConfig, params: Any, inputs: Inputs) -> Array:
    """Returns the ids: a module embeds them itself."""
    return inputs.token_ids


def _layers(
    call: Callable[..., Any], config: DecoderConfig, params: Any, x: Array, kv: tuple[Any, ...],
    inputs: Inputs, ops: Ops,
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:  # fmt: skip
    """Returns hidden states, [T, E], the caches, one a layer, and no extras."""
    attend = _attend(config, inputs, ops, kv)
    hidden = call("__call__", params, x, inputs.positions, attend)
    calls = len(attend.caches)
    if calls < len(kv):
        raise ValueError(
            f"attend must be called num_hidden_layers={len(kv)} times, got {calls}: call it once "
            "in each layer, or correct num_hidden_layers"
        )
    shape = inputs.token_ids.shape[0], config.hidden_size
    _expect("hidden", hidden, shape, "return it from __call__, or correct hidden_size")
    return hidden, tuple(attend.caches), {}


def _attend(config: DecoderConfig, inputs: Inputs, ops: Ops, kv: tuple[Any, ...]) -> Attend:
    return Attend(config, inputs, ops, kv, [], get_opaque_trace_state())


def _logits(call: Callable[..., Any], config: DecoderConfig, params: Any, hidden: Array) -> Array:
    """Scores every token of the vocabulary: hidden [..., E] -> [..., V], in its dtype."""
    scores = call("logits", params, hidden)
    shape = (*hidden.shape[:-1], config.vocab_size)
    _expect("logits", scores, shape, "return scores of the whole vocabulary, or correct vocab_size")
    return scores.astype(hidden.dtype)


def _no_checkpoint(*_: Any) -> NoReturn:
    raise ValueError(
        "a checkpoint in Hugging Face's layout was asked for, a flax model names no tensors of "
        "one: save and restore its params with Orbax, and give them to Engine"
    )


def _expect(name: str, array: Any, shape: tuple[int, ...], cure: str) -> None:
    got = getattr(array, "shape", None)
    if got != shape:
        what = type(array).__name__ if got is None else list(got)
        raise ValueError(f"{name} must be of shape {list(shape)}, got {what}: {cure}")


def _names(path: tuple[Any, ...]) -> tuple[str | int, ...]:
    """Returns the attributes, keys and indices that lead to a leaf."""
    kinds = ("name", "key", "idx")
    return tuple(next(getattr(e, kind) for kind in kinds if hasattr(e, kind)) for e in path)


def _listed(paths: set[tuple[str | int, ...]]) -> list[str]:
    return sorted("/".join(map(str, path)) for path in paths)
