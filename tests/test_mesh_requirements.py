"""What several devices need, refused by name before anything is allocated."""

import importlib.metadata
import itertools
import re
import time
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from jaxrunner import LLM, embedded
from jaxrunner.parallel import requirements
from jaxrunner.parallel.mesh import make_mesh
from jaxrunner.parallel.requirements import (
    check_mesh,
    check_sum,
    check_transfer,
    check_versions,
    describe,
)
from tests.support.small_llm import SIZES, live_bytes


def stand_in(*kinds: str, platform: str = "gpu") -> Any:
    """Returns a mesh of devices that are not there."""
    devices = [SimpleNamespace(device_kind=kind, platform=platform) for kind in kinds]
    shape = dict(tensor=len(kinds))
    flat = SimpleNamespace(flat=devices)
    return SimpleNamespace(devices=flat, shape=shape, size=len(kinds), is_multi_process=False)


def test_devices_are_of_one_kind():
    assert describe(stand_in(*["NVIDIA H200"] * 4)) == "4 x NVIDIA H200, tensor 4"
    with pytest.raises(ValueError, match=r"of one kind, got 2 x H200, 1 x A100, tensor 3: name"):
        check_mesh(stand_in("H200", "A100", "H200"))


@pytest.mark.parametrize(
    "of_jax,nccl,words",
    [
        ("0.11.2", "2.32.3", "several GPUs with JAX 0.11.2: each sum over them takes 20 us"),
        ("0.12.0", "2.28.9", r"JAX 0\.12\.0 want NCCL 2\.32 or newer, there is 2\.28\.9"),
        ("0.12.0", "2.32.3", None),
        ("0.12.0", None, None),
    ],
)
def test_old_versions_are_named(monkeypatch, of_jax, nccl, words):
    installed = {"jax-cuda13-plugin": of_jax, "nvidia-nccl-cu13": nccl, "nvidia-nccl-cu12": "2.1"}

    def version(name: str) -> str:
        if installed.get(name) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return cast(str, installed[name])

    monkeypatch.setattr(importlib.metadata, "version", version)
    info = tuple(map(int, of_jax.split(".")))
    monkeypatch.setattr(requirements.jax, "__version_info__", info)
    check_mesh(stand_in("H200"))  # one GPU sums nothing
    check_mesh(stand_in("cpu", "cpu", platform="cpu"))
    two = stand_in("H200", "H200")
    if words is None:
        check_mesh(two)
    elif info < requirements.FAST_SUMS_JAX:
        with pytest.warns(UserWarning, match=words):
            check_mesh(two)
    else:
        with pytest.raises(RuntimeError, match=words):
            check_versions(info, requirements.find_nccl())


@pytest.mark.devices(4)
def test_a_peer_that_cannot_be_reached_is_named_before_weights_are_read(monkeypatch):
    sizes: dict[str, Any] = SIZES | dict(tensor_parallel_size=2)
    before, timeout_s = live_bytes(), requirements.SUM_TIMEOUT_S
    assert 20 < timeout_s <= 60
    check_sum(make_mesh(4), timeout_s)
    monkeypatch.setattr(requirements, "put", lambda *_: time.sleep(9))
    monkeypatch.setattr(requirements, "SUM_TIMEOUT_S", 0.05)
    kind = re.escape(jax.devices()[0].device_kind)
    words = rf"did not end in 0\.05 s \(2 x {kind}, tensor 2\): a peer"
    with pytest.raises(RuntimeError, match=words):
        LLM(str(embedded.PATH), **sizes)

    def fail(*_):
        raise OSError("no route to host")

    monkeypatch.setattr(requirements, "put", fail)
    with pytest.raises(RuntimeError, match=r"over the devices of this mesh failed \(2 x cpu, ten"):
        LLM(str(embedded.PATH), **sizes)
    assert live_bytes() <= before
    monkeypatch.undo()
    with LLM(str(embedded.PATH), **sizes) as llm:
        assert llm.report().startswith("devices: 2 x cpu, tensor 2\n")
        assert "psum, as reduce_add_norm wants kernels, got reference\n" in llm.report()
        llm.check_health()
        monkeypatch.setattr(requirements, "put", fail)
        with pytest.raises(RuntimeError, match="a sum over the devices of this mesh failed"):
            llm.check_health()


@pytest.mark.devices(4)
@pytest.mark.parametrize("method", ["start", "check_health"])
def test_each_replica_and_each_stage_is_tried(monkeypatch, method):
    """The second replica's mesh too, and what stages send each other."""
    replicas: dict[str, Any] = SIZES | dict(tensor_parallel_size=2, data_parallel_size=2)
    stages: dict[str, Any] = SIZES | dict(pipeline_parallel_size=4)
    tried: list[list[int]] = []

    def check(*asked: Any) -> None:
        *meshes, _ = asked
        tried.append([d.id for mesh in meshes for d in mesh.devices.flat])

    def run(sizes: dict[str, Any]) -> list[list[int]]:
        with LLM(str(embedded.PATH), **sizes) as llm:
            if method == "check_health":
                tried.clear()
                llm.check_health()
            return sorted(tried)

    monkeypatch.setattr(requirements, "check_sum", check)
    assert run(replicas) == [[0, 1], [2, 3]]
    monkeypatch.setattr(requirements, "check_transfer", check)
    tried.clear()
    want = [[0], [0, 1], [1], [1, 2], [2], [2, 3], [3], [3, 0], [3, 1], [3, 2]]
    assert run(stages) == want


@pytest.mark.devices(2)
def test_a_stage_that_cannot_be_reached_is_named(monkeypatch):
    one, other = (make_mesh(1, [device]) for device in jax.devices()[:2])
    check_transfer(one, other, 60.0)
    with LLM(str(embedded.PATH), **SIZES, pipeline_parallel_size=2) as llm:
        llm.check_health()
        put, calls = requirements.put, itertools.count()

        def fail(*args: Any) -> Any:
            if next(calls) < 2:  # those of sums on each stage
                return put(*args)
            raise OSError("no route to host")

        monkeypatch.setattr(requirements, "put", fail)
        words = r"a transfer from stage to stage failed \(\S+0 to \S+1\): see the cause above, NCCL"
        with pytest.raises(RuntimeError, match=words):
            llm.check_health()
