"""Reads by index, against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.indexing import take

TABLE = np.arange(2 * 3 * 4, dtype=np.int32).reshape(2, 3, 4) + 1


def one(row: int, column: int, axes: int) -> np.ndarray:
    """Returns `TABLE[row, column]`, or its numbers at column 2, and zeros outside of it."""
    inside = 0 <= row < 2 and 0 <= column < 3
    found = TABLE[row, column] if inside else np.zeros(4, np.int32)
    return found if axes == 2 else found[2]


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("dtype", ["int32", "float32", "bool"])
def test_several_indices_read_zero_where_one_is_out_of_range(axes, dtype):
    rows, columns = (np.array(i) for i in ([0, 1, 1, -1, 0, 2, 0], [2, 0, 3, 0, -1, 0, 1]))
    index = (jnp.asarray(rows), jnp.asarray(columns), jnp.int32(2))[:axes]
    found = take(jnp.asarray(TABLE, dtype), index)
    want = np.stack([one(*pair, axes) for pair in zip(rows, columns, strict=True)])
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, want.astype(dtype))


def test_a_row_of_indices_reads_rows():
    found = take(jnp.asarray(TABLE), jnp.array([1, 2, 0]))
    np.testing.assert_array_equal(found, [TABLE[1], np.zeros_like(TABLE[0]), TABLE[0]])
