"""The tiny model with drafters of each kind, of random weights, and requests for it.

Each is made once: engines of equal models share what is lowered.
"""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner import pytree
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.hf_config import Settings
from jaxrunner.models.llama import llama
from jaxrunner.speculators import eagle as heads
from jaxrunner.speculators import eagle3_config, eagle3_head
from jaxrunner.speculators.draft_model import DraftModelConfig, draft_model
from jaxrunner.speculators.drafted import with_drafter
from jaxrunner.speculators.drafter import Drafted, DraftedConfig
from jaxrunner.speculators.eagle import eagle
from jaxrunner.speculators.eagle3 import eagle3
from jaxrunner.speculators.mimo_mtp import MimoMtpConfig, mimo_mtp
from jaxrunner.speculators.ngram import ngram
from tests.support import eagle3_reference as reference
from tests.support import tiny

K = 3  # drafts of a step
PROMPTS = {
    "a": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], "b": [9, 2], "c": list(range(1, 20)), "d": [7] * 9,
    "e": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8],
}  # fmt: skip
RULED = dict(repetition_penalty=1.2, min_tokens=3, bad_words=[[5, 9]])


def random_like(cls, dims, seed):
    rng = np.random.default_rng(seed)

    def make(axes, shape, dtype):
        if jnp.issubdtype(dtype, jnp.integer):
            return jnp.zeros(shape, dtype)
        return jnp.asarray(rng.standard_normal(shape, np.float32) * 0.4, dtype)

    return pytree.build(make, cls, dims | {"param": jnp.float32})


@functools.cache
def with_itself():
    """Returns the tiny model drafted by itself: every draft is right."""
    config, params = tiny.model_and_params()
    own = DraftModelConfig(llama, config)
    model, drafted = with_drafter(llama, config, draft_model(llama), own, K)
    return model, drafted, Drafted(params, params)


@functools.cache
def with_another():
    """Returns it drafted by a model of other sizes, and so with a cache group of its own."""
    config, params = tiny.model_and_params()
    other = tiny.config(num_key_value_heads=1, num_hidden_layers=1, head_dim=4)
    own = DraftModelConfig(llama, other)
    model, drafted = with_drafter(llama, config, draft_model(llama), own, K)
    return model, drafted, Drafted(params, tiny.random_params(other, seed=5))


@functools.cache
def with_eagle(**changes):
    """Returns it drafted by an EAGLE head of random weights."""
    config, params = tiny.model_and_params()
    settings = Settings(tiny.SETTINGS | dict(num_hidden_layers=1) | changes)
    own = heads.read(settings, config, frozenset())
    model, drafted = with_drafter(llama, config, eagle, own, K)
    return model, drafted, Drafted(params, random_like(heads.Params, own.dims, 3))


@functools.cache
def with_eagle3():
    """Returns it drafted by an EAGLE-3 head of random weights, for some of the tokens alone."""
    config, params = tiny.model_and_params()
    settings = reference.SPECFORGE | dict(eagle_aux_hidden_state_layer_ids=[0, 1, 1])
    own = eagle3_config.read(Settings(settings), config, ("lm_head.weight", "d2t"))
    model, drafted = with_drafter(llama, config, eagle3, own, K)
    weights = random_like(eagle3_head.Params, own.dims, 3)
    ids = jnp.sort(jax.random.permutation(jax.random.key(4), reference.V)[: reference.DRAFT_V])
    weights = replace(weights, d2t=(ids - jnp.arange(ids.size)).astype(jnp.int32))
    return model, drafted, Drafted(params, weights)


@functools.cache
def with_mtp():
    """Returns it drafted by a layer of multi-token prediction of random weights."""
    config, params = tiny.model_and_params()
    own = MimoMtpConfig(config)
    model, drafted = with_drafter(llama, config, mimo_mtp, own, K)
    return model, drafted, Drafted(params, random_like(mimo_mtp.params, own.dims, 3))


DRAFTERS = dict(
    itself=with_itself, another=with_another, eagle=with_eagle, eagle3=with_eagle3, mtp=with_mtp,
    wide=lambda: with_eagle(num_key_value_heads=1),
)  # fmt: skip


@functools.cache
def probabilistic(drafter, rejection):
    """Returns the tiny model with one of `DRAFTERS`, which draws with noise of its own."""
    _, config, params = DRAFTERS[drafter]()
    assert isinstance(config, DraftedConfig)
    model, both = with_drafter(
        llama, config.target, config.family, config.drafter, K, draft_sample_method="probabilistic"
    )
    assert model.speculator is not None
    return model._replace(speculator=model.speculator._replace(rejection=rejection)), both, params


@functools.cache
def with_ngrams():
    """Returns it drafted by what followed its last tokens before."""
    config, params = tiny.model_and_params()
    return llama._replace(speculator=ngram(K, max_n=2)), config, params


def adaptive(model, config, params):
    """Returns it with drafts that may be none."""
    return model._replace(speculator=model.speculator._replace(adaptive=True)), config, params


@functools.cache
def with_itself_or_none():
    """Returns it drafted by itself in steps that gain by it, and in others not at all."""
    return adaptive(*with_itself())


def run(model, config, params, rule, **changes):
    """Returns tokens by request, the steps it took, and the engine."""
    e, steps = Engine(model, config, tiny.engine_config(**changes), params), 0
    requests = {
        name: e.add(name, ids, SamplingParams(max_tokens=20, seed=i, **rule))
        for i, (name, ids) in enumerate(PROMPTS.items())
    }
    while e.has_unfinished:
        e.step()
        steps += 1
    return {name: r.output_token_ids for name, r in requests.items()}, steps, e


def joined(logprobs: list[Any], params: SamplingParams) -> list[np.ndarray]:
    """Returns the arrays of logprobs, a token a row, which come by steps."""
    asked = len(params.logprob_token_ids or ()) or params.logprobs or 0
    parts = [jax.tree.leaves(part) for part in logprobs]  # with the columns of their neighbours
    parts = [[x[:, :asked] if x.ndim > 1 else x for x in part] for part in parts]
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
