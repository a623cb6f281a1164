"""The arguments of the methods of `Lifecycle`. Knows no JAX."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxrunner.api.validation import Bound, shown

FOLDER = Bound(str, also=(Path,))
IN_FOLDER: dict[str, Bound] = {"folder": FOLDER}
SLEEP: dict[str, Bound] = {"level": Bound(int, among=(1, 2))}
WAKE_UP: dict[str, Bound] = {"tags": Bound(str, optional=True, each=True)}
SAVE_SHARDED_STATE: dict[str, Bound] = {"path": FOLDER}
CHECK_HEALTH: dict[str, Bound] = {"timeout_s": Bound(float, 1e-3, 1e6)}


def read_overrides(overrides: Any) -> dict[str, Mapping[str, Any]]:
    """Returns settings by the name of their config.

    Raises:
      TypeError: they are none.
    """
    wanted = "a dict from names of configs to dicts of their fields"
    if not isinstance(overrides, Mapping):
        raise TypeError(f"overrides must be {wanted}, got {shown(overrides)}")
    for name, values in overrides.items():
        if not isinstance(name, str) or not isinstance(values, Mapping):
            pair = f"{shown(name)}: {shown(values)}"
            raise TypeError(f"overrides must be {wanted}, got among them {pair}")
    return dict(overrides)


def check_changeable(name: str, values: Iterable[Any], allowed: Iterable[str]) -> None:
    """Checks that fields of a config can change while its model is at work.

    Raises:
      ValueError: one cannot.
    """
    for field in values:
        text = field if isinstance(field, str) else shown(field)
        if text not in allowed:
            raise ValueError(
                f"{name:.60}.{text:.60} cannot change while the model is at work, of {name:.60} "
                f"{list(allowed)} can: build a new one with it"
            )
