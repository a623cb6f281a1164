"""Engines come and go: nothing is left on the device, and several live side by side."""

from pathlib import Path
import subprocess
import sys

from small_llm import SIZES, live_bytes
from test_engine import KINDS, PROMPTS, drain, engine, run

from jaxrunner import LLM, SamplingParams, embedded

ROOT = Path(__file__).parents[1]
CYCLES = 20
SCRIPT = """
from jaxrunner import LLM, SamplingParams, embedded
llm = LLM(str(embedded.PATH), {sizes})
stream = llm.stream("def f", SamplingParams(max_tokens=20, ignore_eos=True))
print(next(stream).outputs[0].token_ids)
"""


def test_what_is_closed_leaves_nothing_on_the_device():
    params = SamplingParams(temperature=0.0, max_tokens=4)
    texts, held = [], []
    for _ in range(CYCLES):
        with LLM(str(embedded.PATH), **SIZES) as llm:
            texts.append(llm.generate("def f", params, use_tqdm=False)[0].outputs[0].text)
        llm.close()  # twice
        del llm
        held.append(live_bytes())
    assert len(set(texts)) == 1
    assert len(set(held[1:])) == 1, held  # the first leaves constants that all share


def test_engines_take_turns():
    params = [KINDS["greedy"], KINDS["sampled"]]
    want = [run(engine(), [PROMPTS[i]], [params[i]]) for i in range(2)]
    engines = [engine(), engine(num_blocks=40)]
    requests = [e.add("a", PROMPTS[i], params[i]) for i, e in enumerate(engines)]
    while any(e.has_unfinished for e in engines):
        for e in engines:
            e.step()
    for e in engines:
        drain(e)
    assert [[r.output_token_ids] for r in requests] == want


def test_python_ends_with_an_engine_at_work():
    sizes = ", ".join(f"{name}={value!r}" for name, value in SIZES.items())
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.format(sizes=sizes)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("["), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
