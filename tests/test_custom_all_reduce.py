"""Sums over devices that their norm makes, on fake devices of a CPU, where a psum stands in."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, embedded
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.device.operations import operations
from jaxrunner.device.program_spec import step_key
from jaxrunner.kernels_pallas.products import peer_rows
from jaxrunner.kernels_pallas.products.peer_rows import Peers
from jaxrunner.operation import Operation
from jaxrunner.ops.plain import add_rms_norm
from jaxrunner.parallel import custom_all_reduce, requirements
from jaxrunner.parallel.custom_all_reduce import KERNEL, DeviceParts, device_parts, refuses
from jaxrunner.parallel.mesh import TENSOR, mesh_of
from tests.support import data_ranks, small_checkpoint, small_llm, tiny

ENGINE = tiny.engine_config()


def on(num: int = 2, *, is_multi_process: bool = False) -> Any:
    """Returns the config of a model on devices that are not there."""
    gpus = [SimpleNamespace(local_hardware_id=i) for i in range(num)]
    mesh = SimpleNamespace(
        shape={TENSOR: num}, is_multi_process=is_multi_process, devices=SimpleNamespace(flat=gpus)
    )
    return SimpleNamespace(mesh=mesh)


class Driver:
    """Stands for CUDA's driver on a host whose GPUs of even and of odd numbers are apart."""

    error = 0

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
        handle._obj.value = 10 + ordinal
        return 0

    def cuDeviceCanAccessPeer(self, found: Any, device: Any, peer: Any) -> int:
        found._obj.value = int(device.value != peer.value and (device.value - peer.value) % 2 == 0)
        return self.error


class Kernel:
    """Stands for `reduce_add_norm`: a psum, and NaN where a device has not its own places."""

    def __init__(self):
        self.num_tokens: list[int] = []  # of each call, while a program is traced

    def run(self, x: Any, residual: DeviceParts, peers: Peers, *how: Any) -> tuple[Any, Any]:
        assert peers.E == x.shape[1]
        places, num = peers.places, jax.lax.axis_size(TENSOR)
        assert places.shape == (num + 2, 2)
        rank = jax.lax.axis_index(TENSOR).astype(jnp.uint32)
        is_own = (places[num + 1, 0] == rank) & (places[num] == places[rank]).all()
        self.num_tokens.append(x.shape[0])
        total, out = add_rms_norm(x, residual.astype(x.dtype), *how)
        return jnp.where(is_own, total, jnp.nan), out


@pytest.fixture
def kernel(monkeypatch) -> Kernel:
    """Lets programs take peers, and their kernel be a psum."""
    made = Kernel()
    monkeypatch.setattr(custom_all_reduce, "KERNEL", Operation("stand-in", made.run))
    monkeypatch.setattr(
        custom_all_reduce, "refuses", lambda config, *_: None if mesh_of(config) else "no mesh"
    )
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Any, list[Any]]:
    """Returns a checkpoint, and what one device answers."""
    pytest.importorskip("llguidance")
    folder = small_checkpoint.save(tmp_path_factory.mktemp("small"))
    with small_checkpoint.start(folder) as llm:
        return folder, small_checkpoint.tokens(llm)


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    "devices",
    [
        dict(tensor_parallel_size=2),
        dict(tensor_parallel_size=4),
        dict(tensor_parallel_size=2, pipeline_parallel_size=2),
        dict(tensor_parallel_size=2, data_parallel_size=2),
        dict(tensor_parallel_size=2, num_decode_steps=3),
    ],
    ids=lambda devices: "-".join(map(str, devices.values())),
)
def test_tokens_are_those_of_one_device(saved, kernel, devices):
    folder, want = saved
    with small_checkpoint.start(folder, **devices) as llm:
        assert small_checkpoint.tokens(llm) == want
        assert "sums over devices: reduce_add_norm\n" in llm.report()
    assert kernel.num_tokens


@pytest.mark.devices(2)
def test_sums_that_the_kernel_refuses_are_psums(saved, monkeypatch):
    monkeypatch.setattr(custom_all_reduce, "refuses", lambda *_: None)
    folder, want = saved
    with small_checkpoint.start(folder, tensor_parallel_size=2) as llm:
        assert small_checkpoint.tokens(llm) == want
        runner = llm.engine.runner
        chosen = operations(runner.program, runner.params_spec, step_key(runner.buckets[0], 1))
    (sums,) = {of.name: of for of in chosen if of.operation == "all-reduce, add_norm"}.values()
    assert sums.name == "psum, add_norm"
    assert sums.refused == {"reduce_add_norm": "x must be bfloat16 or float16, got float32"}


@pytest.mark.devices(2)
def test_memory_for_rows_is_planned_and_made_anew_for_a_fork_and_a_restart(saved, kernel):
    folder, want = saved
    with small_checkpoint.start(folder, tensor_parallel_size=2) as llm:
        runner = llm.engine.runner
        bytes_of = peer_rows.num_bytes(2, runner.program.peer_rows, 24)
        weights = sum(x.nbytes // 2 for x in jax.tree.leaves(runner.params))
        assert llm.memory_plan.weights >= bytes_of
        assert llm.memory_plan.weights - bytes_of < 2 * weights
        other = runner.fork()
        first, of_fork = (np.asarray(of.params_of(None)[-1]) for of in (runner, other))
        assert first.shape == of_fork.shape == (2, 4, 2) and (first[:, 0] != of_fork[:, 0]).any()
        other.close()
        runner.restart()
        assert small_checkpoint.tokens(llm) == want


@pytest.mark.devices(6)
def test_data_ranks_exchange_rows_with_their_own_devices(kernel, tmp_path):
    folder = small_checkpoint.save_family(tmp_path / "mixture", data_ranks.MIXTURE)
    told = []
    ranks: dict[str, Any] = data_ranks.RANKS | dict(tensor_parallel_size=2)
    for devices in ({}, ranks):
        with LLM(folder, **data_ranks.SIZES, **devices) as llm:
            prompts = [dict(prompt_token_ids=[3 + i, 5, 7]) for i in range(5)]
            outputs = llm.generate(prompts, data_ranks.GREEDY, use_tqdm=False)
            told.append([output.outputs[0].token_ids for output in outputs])
    assert told[0] == told[1] and kernel.num_tokens


@pytest.mark.devices(2)
@pytest.mark.slow
def test_drafters_on_shards_sum_so_too(kernel):
    rule, tokens = SamplingParams(temperature=0.7, seed=3, max_tokens=20), []
    config = dict(method="eagle3", model=str(embedded.EAGLE3_PATH), num_speculative_tokens=2)
    drafting: dict[str, Any] = dict(tensor_parallel_size=2, speculative_config=config)
    for extra in ({}, drafting):
        with LLM(str(embedded.PATH), **small_llm.SIZES, **extra) as llm:
            outputs = llm.generate(["import os\n", "def f(x):"], rule, use_tqdm=False)
            tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1] and kernel.num_tokens


@pytest.fixture
def driver(monkeypatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(requirements.ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    return made


@pytest.mark.parametrize(
    ("changes", "config", "backend", "why"),
    [
        ({}, on(), "reference", "wants kernels, got reference"),
        ({}, object(), "mosaic_gpu", "wants several devices"),
        ({}, on(1), "mosaic_gpu", "wants several devices"),
        (dict(disable_custom_all_reduce=True), on(), "mosaic_gpu", "is off by disable_custom"),
        ({}, on(is_multi_process=True), "mosaic_gpu", "wants devices of one process"),
        (dict(enable_lora=True), on(), "mosaic_gpu", "takes no residual of adapters"),
        ({}, on(2), "mosaic_gpu", "wants devices that reach each other's memory"),
    ],
)
def test_where_devices_write_into_no_memory_of_others(changes, config, backend, why, driver):
    said = refuses(config, tiny.engine_config(**changes), backend)
    assert said is not None and why in said


def test_jax_and_the_driver_are_asked(driver, monkeypatch):
    config = on(4)
    config.mesh.devices.flat = config.mesh.devices.flat[::2]
    assert refuses(config, ENGINE, "mosaic_gpu") is None
    driver.error = 1
    assert "reach each other" in str(refuses(config, ENGINE, "mosaic_gpu"))
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert "wants JAX 0.12" in str(refuses(config, ENGINE, "mosaic_gpu"))


@pytest.mark.parametrize(
    ("E", "parts", "end", "why"),
    [
        (4096, (), None, None),
        (4096, (4,), None, None),
        (2048, (), None, "memory is for 64 rows of 4096, got 8 of 2048"),
        (4096, (), 1, "norms no residual before it is added"),
    ],
)
def test_which_sums_the_kernel_serves(E, parts, end, why):
    def asked(x: Any, parts: Any, weight: Any, places: Any) -> Any:
        residual, more = device_parts(parts, x.dtype), () if end is None else (weight,)
        return KERNEL.refuses(x, residual, Peers(places, 64, 4096), weight, 1e-5, False, *more)

    said: list[Any] = []
    shapes = (8, E), (*parts, 8, E), (E,)
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    places = jax.ShapeDtypeStruct((4, 2), jnp.uint32)
    jax.eval_shape(lambda *args: said.append(asked(*args)), *args, places)
    assert said == [None] if why is None else why in said[0]
