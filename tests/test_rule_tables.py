"""Rows of slot tables are of their table's class, whichever tables were read before."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.pytree import leaf, pytree
from jaxrunner.rule import rows_of


def test_rows_are_of_their_table_s_class():
    """JAX holds the structures of such classes for equal, so a trace of one may be found for
    another; among hundreds it is."""
    slot, tables = jnp.array([2, 0, 9]), []
    for n in range(400):
        names = dict(__annotations__={f"of_{n}": jax.Array}, **{f"of_{n}": leaf("R", jnp.float32)})
        tables.append(pytree(type(f"Table{n}", (), names))(jnp.full(4, n, jnp.float32)))

    def read(tables):
        return [rows_of(table, slot) for table in tables]

    for n, row in enumerate(jax.jit(read)(tables)):
        np.testing.assert_array_equal(getattr(row, f"of_{n}"), [n, n, 0])
