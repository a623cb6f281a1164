"""A process ends well whatever an engine in it is at: XLA's threads crash in one half gone."""

from pathlib import Path
import subprocess
import sys

import jax
import pytest

from tests.support import small_llm

SIZES = small_llm.SIZES | dict(load_format="dummy", hf_overrides=dict(num_hidden_layers=1))
ROOT = Path(__file__).parents[1]
SCRIPT = """
import atexit
atexit.register(lambda: print("rests", x.is_ready(), flush=True))  # the first comes last
import jax
from jaxrunner import LLM, embedded

@jax.jit
def slow(x):
    y = jax.lax.fori_loop(0, 100, lambda i, y: y @ y / 512, jax.numpy.ones((512, 512)))
    return x + y[0, 0].astype(x.dtype)

llm = LLM(str(embedded.PATH), {sizes})
state = llm.runner.state
x = jax.tree.leaves(state)[0]
x.block_until_ready()
slow = slow.lower(x).compile()
x = slow(x)
print("works", not x.is_ready(), flush=True)
llm.runner.state = jax.tree.unflatten(jax.tree.structure(state), [x] + jax.tree.leaves(state)[1:])
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("warm_up", "end"),
    [
        pytest.param(False, "", id="at rest"),
        pytest.param("background", "raise ValueError('behind it')", id="as it compiles, and fails"),
    ],
)
def test_python_ends_once_the_last_step_has(warm_up, end):
    sizes = ", ".join(f"{k}={v!r}" for k, v in (SIZES | dict(warm_up=warm_up)).items())
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(sizes=sizes, end=end)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == bool(end), done.stderr[-2000:]
    # A GPU has done its work by then.
    works = ["works True"] if jax.default_backend() == "cpu" else ["works True", "works False"]
    first, *rest = done.stdout.splitlines()
    assert first in works and rest == ["rests True"]
    assert ("ValueError: behind it" in done.stderr) == bool(end)
