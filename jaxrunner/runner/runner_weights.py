"""The weights of a runner and its adapters, in the form that programs take."""

import abc
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrunner.device.program_spec import flat_params
from jaxrunner.kernels_pallas.products import peer_rows
from jaxrunner.loading.weights import like
from jaxrunner.lora.device_adapters import DeviceAdapters
from jaxrunner.parallel.mesh import TENSOR
from jaxrunner.parallel.pipeline import to_stages
from jaxrunner.program.program import Program
from jaxrunner.runner.request_table import RequestTable
from jaxrunner.scheduling.request import NewRequest


class RunnerWeights(abc.ABC):
    """The part of `ModelRunner` that knows the weights."""

    program: Program
    requests: RequestTable
    params_spec: Any  # abstract arrays that new weights must match
    adapters: DeviceAdapters | None = None
    _placed: Any = None  # the weights, in a pipeline of each stage
    # Memory of devices for each other's rows, in a pipeline of each stage.
    _exchanges: tuple[peer_rows.Exchange | None, ...] = ()

    @property
    def params(self) -> Any:
        """The weights; None until they are loaded, and while they sleep."""
        return self._params

    @params.setter
    def params(self, params: Any) -> None:
        self._params, self._placed = params, to_stages(self.program.config, params)
        self._flatten() if self._exchanges else self.connect()
        if self.adapters is not None:
            self.adapters.sleep() if params is None else self.adapters.wake_up()

    def connect(self) -> None:
        """Makes memory for other devices' rows; a step that failed may leave some in the old."""
        stages = self.program.stages or (self.program,)
        self._exchanges = tuple(map(_exchange_of, stages))
        self._flatten()

    def _flatten(self) -> None:
        several = bool(self.program.stages) and self._placed is not None
        parts: Any = self._placed if several else (self._placed,)
        places = [exchange and exchange.places for exchange in self._exchanges]
        flat = tuple(map(flat_params, zip(parts, places, strict=False)))
        self._flat = flat if several else flat[0]

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


def _exchange_of(program: Program) -> peer_rows.Exchange | None:
    if (peers := program.peers) is None:
        return None
    return peer_rows.make(peers, TENSOR, program.peer_rows, program.dims["E"])
