"""Every decoder of the registry and all of its variants against transformers, in one form.

16 prompts at once, 64 new tokens each, of requests that are preempted; then, unless the variant is
like another one, some from cached prefixes, and in shorter chunks. Each token is the likeliest one
after those before it, or as near to that as the tolerance, which is by induction what `generate`
gives, and logprobs are those of logits in float64.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special

from jaxrunner import LLM, SamplingParams
from jaxrunner.caches.window import SlidingWindow
from jaxrunner.hf_config import Settings, read_json
from jaxrunner.models.registry import FAMILIES, read_model
from tests.support import executables, pooling
from tests.support.every_family import ALIKE, CASES, logits

LENGTHS = (60, 51, 40, 33, 31, 23, 17, 16, 13, 9, 8, 7, 5, 3, 2, 1)
PROMPTS = [np.random.default_rng(n).integers(1, 61, n).tolist() for n in LENGTHS]
NEW_TOKENS, FEW = 64, 6
# Of logprobs in float32, of logits up to about 10. Where two tokens are nearer in float64, either
# is the likeliest: what follows is compared with what follows the one that is told.
TOLERANCE = 1e-4
# Transformers' own float32 of these is up to 1.8e-4 from float64.
DELTA_NETS, OF_DELTA_NETS = ("Qwen3Next", "Qwen3_5"), 2.5e-4
SIZES: dict[str, Any] = dict(
    skip_tokenizer_init=True, dtype="float32", max_model_len=128, block_size=8,
    max_num_seqs=16, max_num_batched_tokens=64, token_buckets=(64,), decode_buckets=(16,),
    warm_up=False, cache_dir=None,
)  # fmt: skip
# A state is kept for later requests if asked: so it is of each family's first variant.
CHECKPOINTS: dict[str, Any] = dict(enable_prefix_caching=True, mamba_block_size=32)
KEPT = {case.architecture: name for name, case in [*CASES.items()][::-1] if case.has_states}
# Those that differ most in what layers compute and keep.
QUICK = (
    "llama",
    "gemma 3",
    "command r7b",
    "qwen3, a mixture",
    "deepseek v3, a mixture",
    "gpt-oss, a mixture",
    "nemotron h",
    "qwen 3 next",
)


@pytest.fixture(autouse=True)
def few_maps() -> Iterator[None]:
    """Forgets executables: those of all variants are more than a process can map."""
    yield
    if executables.are_many():
        executables.forget()


# While tests are collected, before some register others.
REGISTERED = {name: model.samples for name, model in FAMILIES.items()}


def test_every_registered_family_is_compared():
    """A new one has a case in `tests/support`: a decoder here, an encoder in test_encoders.py."""
    whole = {case.architecture for name, case in CASES.items() if name not in ALIKE}
    assert whole == {name for name, samples in REGISTERED.items() if samples}
    assert CASES.keys() >= {*ALIKE}
    assert {*pooling.ENCODERS} == {name for name, samples in REGISTERED.items() if not samples}


def read(folder: Path) -> tuple[int, bool]:
    """Returns blocks for some of the requests, and whether keys depend on their prompt's length."""
    _, config = read_model(Settings(read_json(folder / "config.json")))
    windows = all(isinstance(kind, SlidingWindow) for kind in config.cache_kinds)
    return 24 if windows else 150, config.cache_salt(1) != config.cache_salt(60)


class Answers:
    """What requests are told, all of them at once."""

    def __init__(self, llm: LLM, prompts: list[list[int]], count: int):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=-1)
        asked: Any = [dict(prompt_token_ids=ids) for ids in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        told: list[Any] = [output.outputs[0] for output in outputs]
        self.cached = [output.num_cached_tokens for output in outputs]
        self.tokens = [list(one.token_ids) for one in told]
        assert {len(new) for new in self.tokens} == {count}
        self.logprobs = [
            np.array([[row[token].logprob for token in sorted(row)] for row in one.logprobs])
            for one in told
        ]

    def check(self, want: list[np.ndarray], tolerance: float) -> None:
        """Compares with logits in float64 of what follows each prompt, [N, V]."""
        for tokens, logprobs, rows in zip(self.tokens, self.logprobs, want, strict=True):
            rows = scipy.special.log_softmax(rows[: len(tokens)], -1)
            likely = rows[range(len(tokens)), tokens]
            assert (likely > rows.max(-1) - tolerance).all()
            np.testing.assert_allclose(logprobs, rows, atol=tolerance)


@pytest.mark.parametrize(
    "variant", [v if v in QUICK else pytest.param(v, marks=pytest.mark.slow) for v in CASES]
)
def test_tokens_and_logits_are_those_of_transformers(variant, tmp_path):
    case = CASES[variant]
    module = case.save(tmp_path)
    num_blocks, by_length = read(tmp_path)
    sizes: dict[str, Any] = SIZES | dict(num_blocks=num_blocks)
    if variant in KEPT.values():
        sizes |= CHECKPOINTS
    # Prompts of a later run have a part of their answers, so that prefixes end at various places.
    cuts = [0 if by_length else 3 * i for i in range(len(PROMPTS))][::-1]
    with LLM(tmp_path, **sizes) as llm:
        told = Answers(llm, PROMPTS, NEW_TOKENS)
        assert llm.engine.scheduler.num_preemptions
        runs = [(told, [0] * len(PROMPTS))]
        if variant not in ALIKE:
            parts = [p + new[:cut] for p, new, cut in zip(PROMPTS, told.tokens, cuts, strict=True)]
            Answers(llm, parts[:1], 1)  # or windows, of few blocks, would hold others' tokens
            runs.append((Answers(llm, parts, FEW), cuts))
            assert runs[-1][0].cached[0] >= 32 * llm.engine.config.enable_prefix_caching
    if variant not in ALIKE:
        with LLM(tmp_path, **sizes, long_prefill_token_threshold=16) as llm:
            runs.append((Answers(llm, PROMPTS, FEW), [0] * len(PROMPTS)))
    texts = [prompt + new for prompt, new in zip(PROMPTS, told.tokens, strict=True)]
    exact = logits(module.double(), texts, [*LENGTHS])
    tolerance = OF_DELTA_NETS if case.architecture.startswith(DELTA_NETS) else TOLERANCE
    for answers, skipped in runs:
        starts = zip(exact, LENGTHS, skipped, strict=True)
        answers.check([rows[start + cut - 1 : -1] for rows, start, cut in starts], tolerance)
