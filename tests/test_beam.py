"""Beam search, compared with that of transformers."""

from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.engine.beam import BeamSearchParams

SIZES: dict[str, Any] = dict(
    dtype="float32", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64,
    token_buckets=(64,), decode_buckets=(4,), block_size=16, use_tqdm=False, warm_up=False,
)  # fmt: skip
TEXT = "def read(path):\n    with open(path) as f:\n        "


@pytest.fixture(scope="module")
def llm():
    with LLM(str(embedded.PATH), num_blocks=64, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(embedded.PATH, dtype=torch.float32)


@pytest.mark.parametrize(
    "width,penalty,eos",
    [(1, 1.0, None), (3, 1.0, None), (3, 1.0, 199), (4, 0.0, 199), (4, 2.0, 199)],
)  # 199 is a line break: it occurs
def test_beams_are_those_of_transformers(llm, reference, width, penalty, eos):
    torch = pytest.importorskip("torch")
    llm.completions.eos_token_ids, kept = frozenset({eos} - {None}), llm.completions.eos_token_ids
    params = BeamSearchParams(
        beam_width=width, max_tokens=10, length_penalty=penalty, ignore_eos=eos is None,
        include_stop_str_in_output=True,
    )  # fmt: skip
    try:
        (got,) = llm.beam_search([TEXT], params, use_tqdm=False)
    finally:
        llm.completions.eos_token_ids = kept
    prompt = llm.tokenizer.encode(TEXT)
    with torch.no_grad():
        want = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width, num_return_sequences=width, max_new_tokens=10, do_sample=False,
            length_penalty=penalty, early_stopping=False, eos_token_id=eos, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True, temperature=None, top_p=None,
        )  # fmt: skip
    for row, sequence in zip(want.sequences.tolist(), got.sequences, strict=True):
        assert sequence.tokens == row[: len(sequence.tokens)]
    if width > 1:
        scores = [s.score for s in got.sequences]
        np.testing.assert_allclose(scores, want.sequences_scores.numpy(), atol=1e-4)
    ends = {s.finish_reason for s in got.sequences}
    assert ends <= {"stop", "length"} and ("stop" in ends) == (eos is not None)


def test_a_beam_computes_one_token_a_step(llm):
    llm.reset_prefix_cache()
    computed = []
    launch = llm.engine.runner.step

    def spy(scheduled):
        computed.append(scheduled.total_num_scheduled_tokens)
        return launch(scheduled)

    llm.engine.runner.step = spy
    try:
        params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
        llm.beam_search([TEXT], params, use_tqdm=False)
    finally:
        llm.engine.runner.step = launch
    first, *rest = [n for n in computed if n]
    assert first == len(llm.tokenizer.encode(TEXT)) and rest == [3] * 7


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(beam_width=0), "beam_width=0 is out of range"),
        (dict(temperature=0.5), "temperature=0.5 has no effect on a beam search"),
    ],
)
def test_bad_beams_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**dict(beam_width=2, max_tokens=3) | changes)


def test_parameters_that_are_of_no_beam_are_refused(llm):
    params: Any = SamplingParams()
    with pytest.raises(TypeError, match="params must be a BeamSearchParams, got SamplingParam"):
        llm.beam_search([TEXT], params, use_tqdm=False)


def test_a_beam_without_room_is_refused(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=127)
    with pytest.raises(ValueError, match=r"prompt 0 has .* max_tokens=127 more exceed max_mod"):
        llm.beam_search([TEXT], params, use_tqdm=False)
