"""The slot table of adapters: which of those on the device a request has."""

from typing import Any

from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.slot_table import SlotTable
from jaxrunner.types import Array


@pytree
class AdapterSlots:
    """The place of each request's adapter in the stacks, plus one; 0 for none."""

    place: Array = leaf("R")


def _row(request: Any) -> AdapterSlots:
    return host_value(AdapterSlots, place=request.lora_place)


ADAPTERS = SlotTable("lora", AdapterSlots, _row)
