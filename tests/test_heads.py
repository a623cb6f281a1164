"""A head tells of each step what it makes of hidden states, in one launch or in two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.heads.head import Head
from jaxrunner.models.llama import llama
from jaxrunner.ops.backends import dense
from jaxrunner.types import Inputs
from tests.support import tiny


def state_of(config, params, hidden, batch):
    """Returns the hidden state of each row's last token."""
    return hidden[batch.logits_indices[:, 0]].astype(jnp.float32)


def norm_of(config, params, hidden, batch):
    return jnp.abs(state_of(config, params, hidden, batch)).sum(-1)


HEADS = Head("state", "B E", state_of), Head("norm", "B", norm_of)
MODEL = llama._replace(heads=HEADS)
PROMPTS = {"a": [3, 1, 4, 1, 5], "b": [9, 2], "c": list(range(1, 40))}


def engine(model=MODEL, **changes) -> Engine:
    config, params = tiny.model_and_params()
    return Engine(model, config, tiny.engine_config(**changes), params)


def hidden(ids: list[int]) -> np.ndarray:
    """Returns the last token's hidden state, by dense attention."""
    n, size = len(ids), 48  # what comes behind them changes nothing, and is compiled once
    return np.asarray(all_hidden(np.pad(np.array(ids, np.int32), (0, size - n)), n))[n - 1]


@jax.jit
def all_hidden(tokens, n):
    config, params = tiny.model_and_params()
    inputs = Inputs(tokens, jnp.arange(tokens.size), jnp.full(tokens.size, n))
    return llama.forward(config, params, (None,) * 2, inputs, dense(1))[0]


@pytest.mark.parametrize("logprobs", [None, 1], ids=["one launch", "two launches"])
def test_heads_see_the_last_token_of_each_step(logprobs):
    e = engine()
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=logprobs)
    requests = {name: e.add(name, ids, params) for name, ids in PROMPTS.items()}
    while e.has_unfinished:
        e.step()
    for name, request in requests.items():
        assert len(request.heads["state"]) == len(request.output_token_ids) == 4
        for i, state in enumerate(request.heads["state"]):
            want = hidden([*PROMPTS[name], *request.output_token_ids[:i]])
            np.testing.assert_allclose(state, want, atol=1e-5)
            np.testing.assert_allclose(request.heads["norm"][i], np.abs(want).sum(), rtol=1e-5)


def test_several_steps_a_launch_are_refused():
    with pytest.raises(ValueError, match="num_decode_steps=4 needs a model without heads,"):
        engine(num_decode_steps=4)
