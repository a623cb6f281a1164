"""The common part of encoders: a config that caches nothing, token types, attention both ways."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.caches.encoder_only import EncoderOnly
from jaxrunner.model import Model, Ops, Source
from jaxrunner.models.blocks import forward
from jaxrunner.models.blocks import sources as block_sources
from jaxrunner.models.blocks.description import BlockConfig
from jaxrunner.models.blocks.reading import read_block
from jaxrunner.models.blocks.weights import Norm, Params
from jaxrunner.ops.encoder_attention import bidirectional
from jaxrunner.pytree import abstract, host_value, leaf, nested, pytree
from jaxrunner.slot_table import SlotTable
from jaxrunner.types import Array, Inputs


@dataclass(frozen=True)
class EncoderConfig(BlockConfig):
    """A `BlockConfig` whose layers keep nothing of a text.

    `windows` are seen on both sides.
    """

    types: str = ""  # name of the embeddings of token types, "" for none
    num_types: int = 0
    first_norm: str = ""  # name of the norm of embeddings, "" for none
    first_position: int = 0  # rows of the learned positions before that of a text's first token

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """Nothing, in each layer."""
        return (EncoderOnly(),) * self.num_hidden_layers

    @property
    def longest_len(self) -> int:
        """The most tokens of a text."""
        return self.max_position_embeddings - self.first_position

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        return super().dims | dict(
            num_types=self.num_types, typed=bool(self.types), first_norm=bool(self.first_norm)
        )


@pytree
class EncoderParams(Params):
    """Weights of an encoder."""

    types: Array | None = leaf("num_types E", "param", when="typed")
    first_norm: Norm | None = nested(bias="norm_bias", when="first_norm")


@pytree
class Segments:
    """Where the second of two texts begins in a request, plus one; 0 where there is no second."""

    second_from: Array = leaf("R")


def segments_of(request: Any) -> Segments:
    """Returns a request's row."""
    given = dict(request.params.extra_args or ())
    return host_value(Segments, second_from=int(given.get("first_segment_len", -1)) + 1)


SEGMENTS = SlotTable("segments", Segments, segments_of, extra_args=("first_segment_len",))


def embed(config: EncoderConfig, params: EncoderParams, inputs: Inputs) -> Array:
    """Returns the sum of what a token, its position and its text add, [T, E]."""
    shifted = replace(inputs, positions=inputs.positions + config.first_position)
    x = forward.embed(config, params, shifted)
    if (norm := params.first_norm) is not None:
        return forward.NORMS["layer"](x, norm.norm_weight, norm.norm_bias, config.rms_norm_eps)
    if params.types is None:
        return x
    second_from = inputs.tables[SEGMENTS.name].second_from
    second = (second_from > 0) & (inputs.positions >= second_from - 1)
    return x + params.types[second.astype(jnp.int32) if config.num_types > 1 else 0 * second_from]


def layers(
    config: BlockConfig, params: Any, x: Array, kv: tuple[Any, ...], inputs: Inputs, ops: Ops,
    **kwargs: Any,
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:  # fmt: skip
    """Runs layers of `blocks` whose attention looks both ways."""
    return forward.layers(config, params, x, kv, inputs, bidirectional(ops), **kwargs)


def sources(config: EncoderConfig) -> EncoderParams:
    """Returns where each weight lies in a checkpoint."""
    types = Source.whole(f"{config.types}.weight", config.num_types, config.hidden_size)
    own = dict(vars(block_sources.sources(config)))
    first = block_sources.norm_source(config, config.first_norm) if config.first_norm else None
    # A layer may lack a norm that the others have.
    wanted = abstract(Params, config.dims | dict(param="float32")).layers
    layers = (
        replace(layer, attn_norm=layer.attn_norm if like.attn_norm else None)
        for layer, like in zip(own.pop("layers"), wanted, strict=True)
    )
    types = types if config.types else None
    return host_value(EncoderParams, **own, layers=tuple(layers), types=types, first_norm=first)


encoder = Model(
    read=read_block,
    params=EncoderParams,
    embed=embed,
    layers=layers,
    logits=forward.logits,
    sources=sources,
    tables=(SEGMENTS,),
    samples=False,
)
