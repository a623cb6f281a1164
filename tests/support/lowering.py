"""Lowering of kernels for a GPU, where there need be none."""

import contextlib
import importlib.util
import shutil

import jax
import pytest

NEW = jax.__version_info__ >= (0, 11)
PLUGIN = importlib.util.find_spec("jax_cuda13_plugin") and shutil.which("ptxas")
lowers = pytest.mark.skipif(not NEW, reason="the kernels need JAX 0.11 or newer")


def cuda(cores: int = 132):
    """A stand-in for the device that kernels are lowered for."""
    device = jax.sharding.AbstractDevice("NVIDIA H200", cores, "cuda")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh) if NEW else contextlib.nullcontext()
