"""Objects that change from step to step, as snapshots save and restore them."""

from collections.abc import Mapping
from typing import Any, ClassVar


class Stateful:
    """A class that names what of its objects changes; PyTorch's `Stateful` has the same methods."""

    SAVED: ClassVar[tuple[str, ...]]  # the names of these attributes

    def state_dict(self) -> dict[str, Any]:
        """Returns the attributes that change, by name; they are not copied."""
        return {name: getattr(self, name) for name in self.SAVED}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned, of an object of the same sizes."""
        for name in self.SAVED:
            setattr(self, name, saved[name])
