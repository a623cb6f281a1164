"""Lowering of kernels for a GPU, where there need be none."""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from typing import Any

import jax
import pytest

from tests.support.sources import ROOT

NEW = jax.__version_info__ >= (0, 11)
PLUGIN = importlib.util.find_spec("jax_cuda13_plugin") and shutil.which("ptxas")
lowers = pytest.mark.skipif(not NEW, reason="the kernels need JAX 0.11 or newer")
compiles = pytest.mark.skipif(
    not (PLUGIN and NEW), reason="needs JAX 0.11, the CUDA 13 plugin and ptxas"
)


def compiled_by(script: str, *args: str, **env: str) -> tuple[Any, str]:
    """Runs a script of this folder in its own process: the plugin is no backend that it may use.

    Returns the JSON of its last line, and all that it and the compiler said.
    """
    told = dict(JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT)) | env
    command = [sys.executable, str(ROOT / "tests" / "support" / script), *args]
    done = subprocess.run(command, env=os.environ | told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), done.stdout + done.stderr


def cuda(cores: int = 132):
    """A stand-in for the device that kernels are lowered for."""
    device = jax.sharding.AbstractDevice("NVIDIA H200", cores, "cuda")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh) if NEW else contextlib.nullcontext()
