"""The interface of a model family: weights, three pure functions, and how its files are read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from jaxrunner.caches.latent import LatentCache
from jaxrunner.caches.state import ConvParts, StateCache
from jaxrunner.config import ModelConfig
from jaxrunner.heads.head import Head
from jaxrunner.linear import Weights, per_head
from jaxrunner.mixtures.experts import ExpertWeights, Routes
from jaxrunner.operation import Note, Operation, unnoted
from jaxrunner.ops.routing import Router, RouterConfig
from jaxrunner.slot_table import SlotTable
from jaxrunner.speculators.speculator import Speculator
from jaxrunner.types import Array, Batch, Inputs, LayerCache


class AttentionSpec(NamedTuple):
    """Static settings of one layer's attention."""

    group: int  # cache group of the layer
    window: int | None  # keys a token sees, itself included; None for all before it
    scale: float  # of the scores
    sinks: Array | None = None  # [H], logits of attention sinks, which add to the softmax's sum
    soft_cap: float | None = None  # bound of scores: soft_cap * tanh(score / soft_cap)
    value_dim: int | None = None  # numbers of a latent that are its value; None for other layers
    chunk_size: int | None = None  # tokens see only their own run of so many positions

    def sees(self, query: Array, key: Array) -> Array:
        """Whether queries see keys, given the positions of both, which broadcast."""
        seen = key <= query
        if self.window is not None:
            seen &= key > query - self.window
        if self.chunk_size is not None:
            seen &= key // self.chunk_size == query // self.chunk_size
        return seen

    def first_seen(self, query: Array) -> Array:
        """Returns the first position that queries see, given theirs."""
        first = jnp.zeros_like(query)
        if self.window is not None:
            first = jnp.maximum(first, query - self.window + 1)
        if self.chunk_size is not None:
            first = jnp.maximum(first, query // self.chunk_size * self.chunk_size)
        return first


class Recurrence(NamedTuple):
    """How a recurrent layer updates a request's state, a matrix for each head, token by token.

    A chunk of C tokens is computed in three parts: `within`, for many chunks at once, what does not
    depend on the state before the chunk; `carry`, one chunk after the other, the states; `read`,
    for many chunks at once, the outputs of tokens.

    Inputs are a pytree of [T, groups or heads, ...], heads being a multiple of groups. Inputs of
    padding are 0, and must not change the state. States are float32.
    """

    matrices: tuple[int, ...]  # (heads, rows, columns)
    step: Callable[[Array, Any], tuple[Array, Array]]  # (matrices, inputs of a token) -> both
    within: Callable[[Any], Any]  # (inputs of C tokens) -> a chunk
    carry: Callable[[Array, Any], tuple[Array, Any]]  # (matrices, chunk) -> both, what `read` takes
    read: Callable[[Any, Any], Array]  # (chunk, what `carry` returned) -> [C, ...]
    chunk_size: int = 64  # C
    reads: str = ""  # the field of inputs that only outputs, and not states, depend on


class RopeAndNorm(NamedTuple):
    """Norms of each head, then a rotation, that turn packed projections into queries and keys."""

    cos: Array  # [T, 1, D / 2], float32
    sin: Array
    q_norm: Array | None  # [D], weights of RMSNorm
    k_norm: Array | None
    eps: float
    one_more: bool = False  # whether norms are by 1 + weight, in float32


class AdapterOps(NamedTuple):
    """Kernels of products with adapters, the candidates before plain JAX; see `ops.adapters`.

    They take y, the base product of x; x, [T, I]; the product's stack of adapters; and, [T], the
    place of each token's adapter plus one, 0 for none.
    """

    summed: tuple[Operation, ...] = ()  # (x, the product's weights, place) -> as `Ops.linear`
    linear: tuple[Operation, ...] = ()  # (y [T, N], x, stack, place) -> y with what adapters add
    project: tuple[Operation, ...] = ()  # the same of y in parts, or what `add_norm` takes
    units: tuple[Operation, ...] = ()  # (y [T, 2, F], x, stack, place, activation) -> [T, F]


class AttendLatent(Protocol):
    """Attends to latents; see `Ops`."""

    def __call__(
        self, q: Array, latents: Array, up: Any, cache: Any, spec: AttentionSpec, *,
        per_head: Callable[[str, Array, Any, slice], Array] = per_head,
    ) -> tuple[Array, LatentCache | None]:  # fmt: skip
        """Returns as `Ops.attend_latent`. per_head: the operation that multiplies with `up`."""
        ...


class Convolve(Protocol):
    """Convolves channels over the tokens of each row; see `Ops`."""

    def __call__(
        self, x: Array, weight: Array, bias: Array | None, cache: Any, group: int,
        parts: ConvParts | None = None, /,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Returns as `Ops.convolve`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ops:
    """The operations of a layer that kernels may run. `ops.backends` makes them for a batch.

    attend: (q [T, H, D], k [T, K, D], v [T, K, D], cache, spec) -> (out [T, H, D], cache). Stores
        keys and values where serving does, then attends; a trainer has no cache.
    rotate_attend: (qkv [T, K, P, D], heads, cache, spec) -> as `attend`, of packed projections
        that are to be normed and rotated first; `split_heads` and `attend`, in fewer launches.
    attend_latent: (q [T, H, N + D], latents [T, R + D], up [N + V, H, R], cache, spec) -> (out
        [T, H, V], cache). Stores latents as `attend` does keys, then attends: a head's keys and
        values are products of the first R numbers, `spec.value_dim`, with `up`, and each key ends
        with the others, that all heads share.
    convolve: (x [T, C], weight [C, W], bias [C] or None, cache, group) -> (y [T, C], cache). Each
        channel's sum over a token and the W - 1 before it, which a `StateCache` holds. With
        `ConvParts` behind `group` x is [T, G, M], weight [G, C, W] and bias [G, C], and y the parts
        of what SiLU makes of the sums, [T, G, n] each.
    recur: (rule, inputs, cache, group) -> (out [T, heads, ...], cache). Carries the matrices of a
        `StateCache` on over tokens, as a `Recurrence` says.
    linear: (x [T, *inputs], w) -> [T, *outputs]. x is `TokensForProducts` where an
        `add_norm` of the same operations made it so for w; so it may be for `mlp`.
    project_qkv: (x [T, E], w of [K, P, D, E]) -> packed projections, [T, K, P, D], as `linear`, or
        `PackedParts` of them, for `rotate_attend` alone.
    per_head: (axes, x [T, H, ...], w [outputs, H, inputs], part) -> an einsum with `part` of the
        outputs of weights that a class names as its `per_head`.
    plain_linear: (x [T, E], w) -> [T, outputs], of so few outputs that no kernel is asked.
    project: (x [T, *inputs], w) -> the residual, [T, E], that `add_norm` takes.
    mlp: (x [T, E], gate_up of [2, F, E], down of [E, F], activation="silu", beside_experts=False)
        -> the residual that a gated MLP adds, as `project` returns it; its gates go through one of
        `plain.ACTIVATIONS`. beside_experts: whether neither it nor `experts` reads the other's.
    route: (config, w, logits [T, X]) -> the experts of each token; none of a bucket's padding.
    experts: (x [T, E], routes, w) -> the residual that a mixture's experts add, as `project`
        returns it.
    norm_heads: (x [T, heads, D], weight [all heads, D], eps) -> the RMSNorm of a token's heads,
        taken together with those of other devices.
    add_norm: (x, residual, weight, eps, one_more=False, end=None, *, readers=()) -> (x + residual,
        its RMSNorm), [T, E] each. The residual is [T, E], or parts of it, [parts, T, E] in float32
        or their dtype, of which there may be none. With `one_more` norms are by 1 + weight, in
        float32. end: [E], weight of an RMSNorm of the residual before it is added; callers leave it
        out where there is none. readers: weights whose products, by `linear`, `project_qkv` or as
        `gate_up` of `mlp`, are all that reads the norm, which may then be `TokensForProducts`; see
        `told_readers`.
    batch: the step that they are of: each token's row and slot, each row's tokens and blocks; None
        for a trainer's.
    adapters: kernels of products with adapters.
    """

    attend: Callable[
        [Array, Array, Array, LayerCache | None, AttentionSpec], tuple[Array, LayerCache | None]
    ]
    rotate_attend: Callable[
        [Any, RopeAndNorm, LayerCache | None, AttentionSpec], tuple[Array, LayerCache | None]
    ]
    attend_latent: AttendLatent
    convolve: Convolve
    recur: Callable[[Recurrence, Any, StateCache | None, int], tuple[Array, StateCache | None]]
    linear: Callable[[Any, Weights], Array]
    project_qkv: Callable[[Any, Weights], Any]
    project: Callable[[Array, Weights], Array]
    mlp: Callable[..., Array]
    route: Callable[[RouterConfig, Router, Array], Routes]
    experts: Callable[[Array, Routes, ExpertWeights], Array]
    norm_heads: Callable[[Array, Array, float], Array]
    add_norm: Callable[..., tuple[Array, Any]]
    plain_linear: Callable[[Array, Weights], Array] = lambda x, w: w.product(x)
    per_head: Callable[[str, Array, Array, slice], Array] = per_head
    batch: Batch | None = None
    adapters: AdapterOps = field(default_factory=AdapterOps)


class MakeOps(Protocol):
    """Makes the operations of a batch."""

    def __call__(self, batch: Batch, *, note: Note = unnoted) -> Ops:
        """Returns the operations; calls `note` with the implementation that each runs."""
        ...


class Source(NamedTuple):
    """The tensors of a checkpoint that a weight is made of.

    join: returns the weight, in the shape and dtype that its class declares, from the tensors. If
        that dtype is one that models compute in, tensors are converted to it first; else they come
        as they are stored. Takes and returns numpy arrays, as does `split`.
    split: inverse of `join`; None where the tensors cannot be restored, as from 8 bits.
    dtypes: dtypes that each tensor may be stored in. Where empty: any that models compute in, or,
        for a weight of another dtype, any. If a tensor may be stored in another dtype than models
        compute in, `join` gets all tensors as stored, and its result is rounded to the weight's.
    is_module: whether it is the matrix of a module that this family holds as an array, where others
        multiply with it: quantised checkpoints have it in few bits.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    join: Callable[[list[np.ndarray]], np.ndarray]
    split: Callable[[np.ndarray], list[np.ndarray]] | None
    dtypes: tuple[tuple[str, ...], ...] = ()
    is_module: bool = False

    def beside(self, other: "Source") -> "Source":
        """Returns a source of the tensors of both; its `join` gets those of `other` last."""
        names, shapes = self.names + other.names, self.shapes + other.shapes
        return Source(names, shapes, self.join, None, self.dtypes + other.dtypes)

    @classmethod
    def whole(cls, name: str, *shape: int, held: tuple[int, ...] = ()) -> "Source":
        """Returns the source of a weight that is one tensor; held: the weight's own shape."""
        held = held or shape
        return cls((name,), (shape,), lambda a: a[0].reshape(held), lambda a: [a.reshape(shape)])


class Stored(Protocol):
    """The weights of a model family or a drafter and their tensors in files, for loading."""

    @property
    def params(self) -> type:
        """The pytree of weights, declared by axes."""
        ...

    @property
    def sources(self) -> Callable[..., Any]:
        """(config) -> `params` filled with `Source`."""
        ...

    @property
    def spare(self) -> tuple[str, ...]:
        """Prefixes of tensor names that its files may hold and that are not read."""
        ...


class StoredConfig(Protocol):
    """The settings of a config that loading needs."""

    @property
    def architecture(self) -> str:
        """Its name in messages."""
        ...

    @property
    def dims(self) -> dict[str, Any]:
        """Sizes of axes and flags of its weights."""
        ...


class Model(NamedTuple):
    """A model family: pure functions of its `config` and `params`."""

    read: Callable[..., ModelConfig]  # (settings) -> config
    params: type  # pytree of weights, declared by axes
    embed: Callable[..., Array]  # (config, params, inputs) -> x [T, E], which `layers` take
    # (config, params, x, kv, inputs, ops, *, first=0, last=None, extras=()) -> hidden [T, E], kv,
    # extras by name. Runs layers `first` to `last`, whose caches are `kv`. After the model's last
    # layer hidden states are normed; after an earlier layer they are the x of the next call.
    layers: Callable[..., tuple[Array, tuple[Any, ...], dict[str, Array]]]
    logits: Callable[..., Array]  # (config, params, hidden [..., E]) -> [..., V], its dtype
    sources: Callable[..., Any]  # (config) -> `params` filled with `Source`
    tables: tuple[SlotTable, ...] = ()  # parameters of requests that it reads in `Inputs.tables`
    heads: tuple[Head, ...] = ()  # arrays that it returns besides tokens
    speculator: Speculator | None = None  # drafts tokens for it
    # Whether it runs on shards: `ops.project`, `ops.mlp` and `ops.experts` make all that layers
    # add to x, and sum it over devices.
    tensor_parallel: bool = False
    # As `logits`, of a device's part of the vocabulary, [..., V / devices]; None if it is whole.
    own_logits: Callable[..., Array] | None = None
    spare: tuple[str, ...] = ()  # prefixes of names of tensors in its files that are not read
    # False for models that only pool: `logits` are one column, 0, or NaN where hidden states are.
    samples: bool = True

    def forward(
        self, config: ModelConfig, params: Any, kv: tuple[Any, ...], inputs: Inputs, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        """Returns hidden states, [T, E], and the caches, one a layer."""
        x = self.embed(config, params, inputs)
        hidden, kv, _ = self.layers(config, params, x, kv, inputs, ops)
        return hidden, kv
