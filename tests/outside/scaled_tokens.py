"""A Llama whose embeddings each request scales by its `extra_args`."""

import jax.numpy as jnp
import numpy as np

from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.llama import Params, llama
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.scheduling.request import NewRequest
from jaxrunner.slot_table import SlotTable
from jaxrunner.types import Array, Inputs


@pytree
class Scale:
    """What embeddings of a request are multiplied by, in each dimension of a period."""

    factors: Array = leaf("R period", jnp.float32)


def row(request: NewRequest) -> Scale:
    """Reads a request's `extra_args`: the factors of odd and even dimensions."""
    given = dict(request.params.extra_args or ())
    factors = [given.get("even", 1.0), given.get("odd", 1.0)]
    return host_value(Scale, factors=np.array(factors, np.float32))


TABLE = SlotTable("scale", Scale, row, extra_args=("even", "odd"), dims=(("period", 2),))


def embed(config: DecoderConfig, params: Params, inputs: Inputs) -> Array:
    """Returns the embeddings of the tokens, scaled, [T, E]."""
    x, factors = llama.embed(config, params, inputs), inputs.tables["scale"].factors
    return x * jnp.tile(factors, (1, config.hidden_size // 2)).astype(x.dtype)


scaled = llama._replace(embed=embed, tables=(TABLE,))
