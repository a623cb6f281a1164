"""The weights of a runner and its adapters, in the form that programs take."""

import abc
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrunner.device.program_spec import flat_params
from jaxrunner.loading.weights import like
from jaxrunner.lora.device_adapters import DeviceAdapters
from jaxrunner.parallel.pipeline import to_stages
from jaxrunner.program import Program
from jaxrunner.runner.request_table import RequestTable
from jaxrunner.scheduling.request import NewRequest


class RunnerWeights(abc.ABC):
    """The part of `ModelRunner` that knows the weights."""

    program: Program
    requests: RequestTable
    params_spec: Any  # abstract arrays that new weights must match
    adapters: DeviceAdapters | None = None

    @property
    def params(self) -> Any:
        """The weights; None until they are loaded, and while they sleep."""
        return self._params

    @params.setter
    def params(self, params: Any) -> None:
        self._params, self._placed = params, to_stages(self.program.config, params)
        parts = self._placed if self.program.stages else None
        self._flat = tuple(map(flat_params, parts)) if parts else flat_params(self._placed)
        if self.adapters is not None:
            self.adapters.sleep() if params is None else self.adapters.wake_up()

    def update_params(self, params: Any) -> None:
        """Replaces the weights, for steps launched from now on. Nothing is compiled anew.

        Raises:
          ValueError, TypeError: they do not match the old ones, which stay; names where.
        """
        self.params = like(params, self.params_spec)

    def params_of(self, size: Any) -> Any:
        """Returns the flat weights for programs of a size, with adapters if `size.lora`."""
        if self.adapters is None or not size.lora:
            return self._flat
        return self.adapters.merged(self._placed)

    def _admit_adapters(self, new: Iterable[NewRequest], counts: Mapping[str, int]) -> bool:
        """Loads the adapters of new requests. Returns whether a request of the step has one."""
        if self.adapters is None:
            return False
        self.adapters.admit(new, self.requests.lora_ids.values())
        for request in new:
            self.requests.note_adapter(request)
        return not self.requests.lora_ids.keys().isdisjoint(counts)
