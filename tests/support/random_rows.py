"""Random requests that ask for some rules, and logits to run these on."""

import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from tests.support.rules import Row

LETTERS = 6  # history and bad words have few ids, so that they meet
REMOVES = ("grammar", "allowed ids", "min tokens", "bad words", "min-p", "top-k", "top-p")
KINDS = (
    "nothing", "greedy", *REMOVES, "logit bias", "repetition", "low repetition", "frequency",
    "presence", "penalties", "temperature", "min-p, top-p", "top-k, top-p", "all",
)  # fmt: skip
OF_SEED = {0: "ties", 1: "large", 2: "huge", 3: "ties again"}


def settings(kind: str, rng: np.random.Generator, size: int) -> dict:
    """Returns random parameters of the request that asks for one rule, or for all."""
    ids = rng.choice(size, 40, replace=False).tolist()
    words = [rng.integers(0, LETTERS, rng.integers(1, 4)).tolist() for _ in range(9)]
    of_kind = {
        "allowed ids": dict(allowed_token_ids=[*ids[:20], *range(LETTERS)]),
        "min tokens": dict(min_tokens=int(rng.integers(4, 7))),
        "bad words": dict(bad_words=words),
        "min-p": dict(min_p=float(rng.uniform(0.01, 0.5))),
        "top-k": dict(top_k=int(rng.integers(1, 30))),
        "top-p": dict(top_p=float(rng.uniform(0.3, 0.99))),
        "logit bias": dict(logit_bias={t: float(rng.normal() * 5) for t in {*ids[:9], 0, 2, 4}}),
        "repetition": dict(repetition_penalty=1.7),
        "frequency": dict(frequency_penalty=float(rng.uniform(-2, 2))),
        "presence": dict(presence_penalty=float(rng.uniform(-2, 2))),
        "temperature": dict(temperature=float(rng.uniform(0.3, 2))),
    }
    several = ("repetition", "frequency", "presence")
    of_kind["penalties"] = {k: v for name in several for k, v in of_kind[name].items()}
    of_kind["low repetition"] = dict(repetition_penalty=0.6)
    of_kind["greedy"] = dict(temperature=0.0, top_k=3, top_p=0.5, min_p=0.4)
    everything = {k: v for part in of_kind.values() for k, v in part.items()}
    of_kind["min-p, top-p"] = dict(temperature=2.0, min_p=0.2, top_p=0.7)
    of_kind["top-k, top-p"] = dict(temperature=2.0, top_k=6, top_p=0.7)
    of_kind["all"] = everything | dict(temperature=0.8, top_k=15, top_p=0.9, min_p=0.01)
    return of_kind.get(kind, {})


def row_of(kind: str, rng: np.random.Generator, size: int, num_drafts: int) -> Row:
    """Returns a request with a random past, due a token behind it and behind each draft."""
    masks = rng.integers(-(2**31), 2**31, (1 + num_drafts, -(-size // 32))).astype(np.int32)
    prompt, outputs, drafts = (rng.integers(0, LETTERS, n).tolist() for n in (5, 4, num_drafts))
    return Row(
        SamplingParams(**settings(kind, rng, size)), prompt, outputs, drafts,
        stop_ids=[0, 1, LETTERS, size - 1], masks=masks if kind in ("grammar", "all") else None,
    )  # fmt: skip


def random_logits(rng: np.random.Generator, seed: int, shape) -> np.ndarray:
    """Returns logits with ties, both zeros, -inf, and for some seeds large values."""
    logits = np.round(rng.normal(size=shape) * 3, 1)
    if OF_SEED[seed] == "large":
        logits *= 1000
    if OF_SEED[seed] == "huge":
        logits[rng.random(shape) < 0.1] = 1e30
        logits[rng.random(shape) < 0.1] = -1e30
    logits[rng.random(shape) < 0.1] = -np.inf
    logits[..., 3] = -0.0
    return logits.astype(np.float32)
