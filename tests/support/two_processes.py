"""Two processes of one program, joined by `jax.distributed`, and what they print."""

from collections.abc import Callable
import json
import os
from pathlib import Path
import socket
import subprocess
import sys
import traceback
from typing import Any, NoReturn

import jax

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240


def start(module: str, *args: object, **environment: str) -> list[subprocess.Popen]:
    """Starts `python -m module RANK PORT ARGS` twice."""
    command, port = [sys.executable, "-m", module], str(_free_port())
    # Sets of names are in another order in each.
    return [
        subprocess.Popen(
            [*command, str(rank), port, *map(str, args)], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | dict(PYTHONHASHSEED=str(rank + 1), PYTHONPATH=str(ROOT)) | environment,
        )
        for rank in range(2)
    ]  # fmt: skip


def tell(rank: int, port: str, run: Callable[[], Any], **how: Any) -> NoReturn:
    """Joins the other process, prints what a function returns there as JSON, and ends."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, **how)
    try:
        print(json.dumps(run()), flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # JAX waits at its end for the other, which may have died, or wait for this one


def ended(process: subprocess.Popen) -> tuple[str, str]:
    """Returns what a process printed until its end, which has to come in `LIMIT_S`."""
    try:
        return process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
        raise AssertionError(f"a process has not ended in {LIMIT_S} s:\n{errors[-3000:]}") from None


def told_by(process: subprocess.Popen) -> dict[str, Any]:
    """Returns the JSON that a process printed last."""
    out, errors = ended(process)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(out.splitlines()[-1])


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
