"""A table on the device with a row of parameters for each request slot.

Whatever a request brings along that programs read is one: a sampling rule's parameters, the id of
an adapter, where its images lie. The state holds tables by name; a request's row is written when it
is admitted.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxrunner.api.sampling_params import SamplingParams


class SlotTable(NamedTuple):
    """What the rows of a table are, and how a request's row is made on the host."""

    name: str  # in `State.tables`
    params: type  # a pytree with one row a slot, R; zeros where there is no request
    # (request, a `scheduling.request.NewRequest`) -> its row, numpy arrays and scalars. Lists may
    # be shorter than their axis. Of a model's table all that keys depend on is in `extra_args`.
    # None for a table that the device alone writes: an admission leaves it as it is.
    row: Callable[[Any], Any] | None
    extra_args: tuple[str, ...] = ()  # the names that it reads in `SamplingParams.extra_args`
    dims: tuple[tuple[str, int], ...] = ()  # sizes of axes of its own, by their letters
    # Those of its axes whose arrays are no request's: a row has nothing for them, and they stay.
    shared: tuple[str, ...] = ()
    # (table, extras by name, batch) -> the table behind the layers of a step, of a model's table
    # that is told the `extras` of these. Layers do not read it. In a pipeline its arrays begin with
    # axis "layers", and each stage writes the rows of its own, of which extras "name.3" tell.
    observe: Callable[[Any, dict[str, Any], Any], Any] | None = None
    extras: tuple[str, ...] = ()


def partition(tables: Iterable[SlotTable]) -> tuple[list[SlotTable], list[SlotTable]]:
    """Returns the tables that layers read, and those that are written behind them."""
    every = list(tables)
    return [t for t in every if t.observe is None], [t for t in every if t.observe is not None]


def observed(
    tables: Iterable[SlotTable], values: dict[str, Any], found: dict[str, Any], batch: Any
) -> dict[str, Any]:
    """Returns the values of tables behind the layers of a step, which told the extras `found`."""
    pairs = [(t.name, t.observe) for t in tables]
    return {name: of(values[name], found, batch) for name, of in pairs if of is not None}


def cache_salt(tables: Iterable[SlotTable], params: SamplingParams) -> bytes:
    """Returns what keys of a request depend on besides its tokens, where a model reads `tables`.

    That is the `extra_args` that they name: requests of other ones share no cached blocks.
    """
    names = {name for table in tables for name in table.extra_args}
    read = sorted(pair for pair in params.extra_args or () if pair[0] in names)
    return repr(read).encode() if read else b""


def check_names(tables: Iterable[SlotTable]) -> None:
    """Checks that tables can be told apart.

    Raises:
      ValueError: two have one name.
    """
    seen: set[str] = set()
    for table in tables:
        if table.name in seen:
            raise ValueError(
                f"two slot tables or sampling rules are called {table.name!r}: give each its own "
                "name"
            )
        seen.add(table.name)
