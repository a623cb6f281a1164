"""The sum over devices with a residual and a norm in one kernel: what it serves and gives."""

import functools
import re
from types import SimpleNamespace
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from jaxrunner.kernels_pallas.products import peer_rows
from jaxrunner.kernels_pallas.products.add_norm import add_rms_norm
from jaxrunner.kernels_pallas.products.peer_rows import Peers
from jaxrunner.kernels_pallas.products.reduce_add_norm import reduce_add_norm, refuses
from jaxrunner.parallel.mesh import DATA, TENSOR
from tests.support import oracles
from tests.support.lowering import compiled_by, compiles

E, ROWS, EPS, CALLS = 4096, 1000, 1e-5, 70
OWN, WHOLE = PartitionSpec(TENSOR), PartitionSpec()
GPUS = jax.local_devices() if jax.default_backend() == "gpu" else []
on_gpus = pytest.mark.skipif(
    len(GPUS) < 2 or jax.__version_info__ < (0, 12), reason="needs two GPUs and JAX 0.12"
)


def shaped(
    T: int = 8, E: int = E, parts: tuple[int, ...] = (1,), num: int = 2, dtype: Any = jnp.bfloat16
) -> tuple[jax.ShapeDtypeStruct, ...]:
    kinds = ((T, E), jnp.bfloat16), ((*parts, T, E), dtype), ((E,), jnp.bfloat16)
    return tuple(jax.ShapeDtypeStruct(*kind) for kind in (*kinds, ((num + 2, 2), jnp.uint32)))


@pytest.mark.parametrize(
    "args, why",
    [
        (shaped(), None),
        (shaped(256, parts=(4,), num=8, dtype=jnp.float32), None),
        (shaped(1000), None),
        (shaped(parts=()), "parts must be [parts, T, E]"),
        (shaped(dtype=jnp.float16), "must be float32 or bfloat16"),
        (shaped(E=4160), "multiple of 5120 long"),
        (shaped(1001), "memory is for 1000 rows of 4096, got 1001 of 4096"),
        (shaped(8, 8192), "memory is for 1000 rows of 4096, got 8 of 8192"),
        (shaped(num=1), "several devices"),
    ],
    ids=lambda x: x.replace(" ", "_") if isinstance(x, str) else None,
)
def test_what_is_not_served_is_said(args, why):
    x, parts, weight, places = args
    peers = Peers(places, ROWS, E)
    said = refuses(x, parts, weight, peers)
    assert said is why if why is None else said is not None and why in said
    if why is not None:
        with pytest.raises(ValueError, match=re.escape(why)):
            run = functools.partial(reduce_add_norm, peers=peers, eps=EPS)
            jax.eval_shape(run, x, parts, weight)


def test_each_device_knows_its_rank_and_where_its_peers_have_memory():
    devices = np.array(jax.local_devices()[:8])
    if devices.size < 8:
        pytest.skip("needs eight devices")
    made = peer_rows.make(Mesh(devices.reshape(2, 4), (DATA, TENSOR)), TENSOR, 4, 16)
    halves = np.asarray(made.places).astype(np.uint64)
    address = {s.device: s.data.unsafe_buffer_pointer() for s in made.memory.addressable_shards}
    found = halves[..., 0] | halves[..., 1] << np.uint64(32)
    for i, device in enumerate(devices):
        first = i // 4 * 4
        peers = [address[peer] for peer in devices[first : first + 4]]
        assert found[i].tolist() == [*peers, address[device], i - first]
    assert (np.asarray(made.memory) == 0xFFFFFFFF).all()


def test_rows_are_exchanged_within_a_process():
    mesh: Any = SimpleNamespace(local_devices=[0, 1], size=4)
    with pytest.raises(ValueError, match="has 2 of 4 devices: sum them by psum"):
        peer_rows.make(mesh, TENSOR, ROWS, E)


@pytest.mark.slow
@compiles
def test_all_rows_of_a_call_find_place_at_once():
    num_kernels, said = compiled_by("aot_reduce.py", MOSAIC_GPU_DUMP_PTXAS="1")
    registers = [int(num) for num in re.findall(r"ptxas info *: Used (\d+) registers", said)]
    spills = [int(num) for num in re.findall(r"(\d+) bytes spill stores", said)]
    assert len(registers) >= 5 and max(registers) <= 128 and max(spills) == 0, (registers, spills)
    assert num_kernels == [3] * 5  # none is another's common subexpression


def chained(step: Any, mesh: Mesh, calls: int) -> Any:
    """Returns a program of calls, each on what the one before gave, for each device's parts."""

    def run(x: Any, parts: Any, weight: Any, places: Any) -> Any:
        # XLA lets no device start before all have met, which it does for a sum that it knows.
        met = lax.psum(jnp.ones((1, 1)), TENSOR) > 0
        x = normed = jnp.where(met, x, jnp.zeros_like(x))

        def call(_: Any, before: Any) -> Any:
            x, normed = before
            more = (parts[0].astype(jnp.float32) + normed[None].astype(jnp.float32)) / 8
            # XLA would not round what it does not store.
            rounded = lax.optimization_barrier(more.astype(parts.dtype))
            return step(x, rounded, weight, places[0])

        x, normed = lax.fori_loop(0, calls, call, (x, normed))
        return x[None], normed[None]

    return jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=(WHOLE, OWN, WHOLE, OWN), out_specs=OWN, check_vma=False
        )
    )


def by_kernel(x: Any, parts: Any, weight: Any, places: Any) -> Any:
    return reduce_add_norm(x, parts, weight, Peers(places, ROWS, E), eps=EPS)


def by_gather(x: Any, parts: Any, weight: Any, places: Any) -> Any:
    """The same roundings: a device's parts are one, and `add_rms_norm` adds those of devices."""
    whole = functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))
    return add_rms_norm(x, lax.all_gather(whole.astype(x.dtype), TENSOR), weight, eps=EPS)


def by_psum(x: Any, parts: Any, weight: Any, places: Any) -> Any:
    return add_rms_norm(x, lax.psum(parts.sum(0).astype(x.dtype), TENSOR), weight, eps=EPS)


@functools.cache
def peers() -> tuple[Mesh, peer_rows.Exchange]:
    mesh = Mesh(np.array(GPUS[: 1 << (len(GPUS).bit_length() - 1)]), (TENSOR,))
    return mesh, peer_rows.make(mesh, TENSOR, ROWS, E)


def problem(T: int, num_parts: int, dtype: str) -> tuple[Any, ...]:
    mesh, shared = peers()
    rng = np.random.default_rng(T)
    x = jnp.asarray(rng.normal(size=(T, E)), jnp.bfloat16)
    parts = jnp.asarray(rng.normal(size=(mesh.size, num_parts, T, E)), dtype)
    weight = jnp.asarray(rng.normal(size=E), jnp.bfloat16)
    placed = (jax.device_put(x, NamedSharding(mesh, WHOLE)) for x in (x, weight))
    own = jax.device_put(parts, NamedSharding(mesh, OWN))
    x, weight = placed
    return x, own, weight, shared.places


@pytest.mark.gpu
@on_gpus
@pytest.mark.parametrize("num_parts, dtype", [(1, "bfloat16"), (4, "bfloat16"), (3, "float32")])
@pytest.mark.parametrize("T", [1, 7, 8, 64, 256, 1000])
def test_many_calls_have_equal_bits_on_all_devices(T, num_parts, dtype):
    mesh, _ = peers()
    args = problem(T, num_parts, dtype)
    run, wanted = chained(by_kernel, mesh, CALLS), chained(by_gather, mesh, CALLS)(*args)
    for _ in range(3):  # another call between two: a program begins with either place of a row
        for got, want in zip(run(*args), wanted, strict=True):
            got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
            assert (got == got[:1]).all() and np.isfinite(got).all()
            np.testing.assert_array_equal(got, want)
        args_of_one = problem(1, 1, "bfloat16")
        chained(by_kernel, mesh, 1)(*args_of_one)


@pytest.mark.gpu
@on_gpus
@pytest.mark.parametrize("T", [1, 64])
def test_a_call_is_what_psum_and_add_rms_norm_give(T):
    mesh, _ = peers()
    x, parts, weight, _ = args = problem(T, 4, "bfloat16")
    given = (parts.astype(jnp.float32) + x.astype(jnp.float32)[None, None]) / 8
    wide = np.asarray(given.astype(jnp.bfloat16), np.float64).sum((0, 1))
    wanted = oracles.add_rms_norm(
        np.asarray(x, np.float64), wide, np.asarray(weight, np.float64), eps=EPS
    )
    for step in (by_kernel, by_psum):
        for got, want in zip(chained(step, mesh, 1)(*args), wanted, strict=True):
            got = np.asarray(got, np.float64)[0]
            assert np.linalg.norm(got - want) < 6e-3 * np.linalg.norm(want), step.__name__
