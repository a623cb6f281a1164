"""A table on the device with a row of parameters for each request slot.

All parameters of a request that programs read are in such tables: those of a sampling rule, the id
of its adapter. `State.tables` holds them by name; a request's row is written when it is admitted.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxrunner.api.sampling_params import SamplingParams


class SlotTable(NamedTuple):
    """The layout of a table's rows, and how the host makes the row of a request."""

    name: str  # in `State.tables`
    params: type  # a pytree with one row a slot, R; zeros where there is no request
    # (request, a `scheduling.request.NewRequest`) -> its row, numpy arrays and scalars. Lists may
    # be shorter than their axis. What a row of a model's table changes in cached keys must come
    # from `extra_args`, which prefix hashes include. None: only the device writes the table.
    row: Callable[[Any], Any] | None
    extra_args: tuple[str, ...] = ()  # the names that it reads in `SamplingParams.extra_args`
    dims: tuple[tuple[str, int], ...] = ()  # sizes of axes of its own, by their letters
    # Axes, by letter, of arrays that belong to no request: rows and admissions leave them out.
    shared: tuple[str, ...] = ()
    # (table, extras by name, batch) -> the table after the layers of a step, for a model's table
    # that records the layers' `extras`. Layers do not read it. In a pipeline its arrays begin with
    # axis "layers", and each stage writes its own layers' rows: extra "name.3" is of layer 3.
    observe: Callable[[Any, dict[str, Any], Any], Any] | None = None
    extras: tuple[str, ...] = ()


def partition(tables: Iterable[SlotTable]) -> tuple[list[SlotTable], list[SlotTable]]:
    """Returns the tables that layers read, and those that are written after the layers."""
    every = list(tables)
    return [t for t in every if t.observe is None], [t for t in every if t.observe is not None]


def observed(
    tables: Iterable[SlotTable], values: dict[str, Any], found: dict[str, Any], batch: Any
) -> dict[str, Any]:
    """Returns the tables, by name, after the layers of a step, which returned extras `found`."""
    pairs = [(t.name, t.observe) for t in tables]
    return {name: of(values[name], found, batch) for name, of in pairs if of is not None}


def cache_salt(tables: Iterable[SlotTable], params: SamplingParams) -> bytes:
    """Returns what cached keys of a request depend on besides its tokens, b"" for nothing.

    These are the values of the `extra_args` that the model's `tables` read: only requests with
    equal values share cached blocks.
    """
    names = {name for table in tables for name in table.extra_args}
    read = sorted(pair for pair in params.extra_args or () if pair[0] in names)
    return repr(read).encode() if read else b""


def check_names(tables: Iterable[SlotTable]) -> None:
    """Checks that names of tables are distinct.

    Raises:
      ValueError: two tables have one name.
    """
    seen: set[str] = set()
    for table in tables:
        if table.name in seen:
            raise ValueError(
                f"two slot tables or sampling rules are called {table.name!r}: give each its own "
                "name"
            )
        seen.add(table.name)
