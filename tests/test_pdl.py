"""Kernels that are placed while the one before them ends."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest

from jaxrunner.kernels_pallas import pdl
from jaxrunner.kernels_pallas.products.add_norm import add_rms_norm
from jaxrunner.kernels_pallas.quantized.add_norm_fp8 import add_norm_fp8
from jaxrunner.kernels_pallas.quantized.add_norm_pairs import add_norm_pairs
from tests.support.lowering import cuda, lowers

MULTIPROCESSOR = 228 * 1024  # bytes of shared memory of an H100 or H200


@lowers
@pytest.mark.parametrize("norm", [add_rms_norm, add_norm_fp8, add_norm_pairs])
@pytest.mark.parametrize(
    ("rows", "is_early", "is_alone"),
    [(1, True, True), (132, True, True), (133, True, False), (132, False, False)],
)
def test_blocks_of_few_rows_are_alone_where_kernels_start_early(
    norm, rows, is_early, is_alone, monkeypatch
):
    found, kernel = [], plgpu.kernel

    def told(*args, compiler_params, **options):
        found.append(compiler_params.reduction_scratch_bytes)
        return kernel(*args, compiler_params=compiler_params, **options)

    monkeypatch.setattr(plgpu, "kernel", told)
    monkeypatch.setattr(pdl, "IN_GRAPHS", is_early)
    x, weight = jnp.zeros((rows, 4096), jnp.bfloat16), jnp.zeros(4096, jnp.bfloat16)
    with cuda():
        jax.make_jaxpr(lambda x, weight: norm(x, x, weight, eps=1e-5))(x, weight)
    assert [2 * size > MULTIPROCESSOR for size in found] == [is_alone]
