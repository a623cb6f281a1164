"""Adapters of a worker by vLLM's method names: known to the host, brought to its device in turn."""

from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp

from jaxrunner.api.validation import Bound, shown, validate
from jaxrunner.loading.peft.adapter import read_adapter, read_folder
from jaxrunner.loading.peft.layers import take_layers
from jaxrunner.loading.peft.saved import take_saved
from jaxrunner.lora.adapter import Adapter, check_saved, pack
from jaxrunner.lora.device_adapters import DeviceAdapters
from jaxrunner.lora.lora_request import LoRARequest, check_lora_request
from jaxrunner.lora.merging import merge, put_back
from jaxrunner.lora.module_names import by_names_of_model
from jaxrunner.lora.pooled_layers import check_layers, head_modules
from jaxrunner.lora.products import Places, places_of, spare_names, whole_modules
from jaxrunner.worker.weight_updates import WeightUpdates

_ID = Bound(int, 1, 2**31 - 1)


class Adapters(WeightUpdates):
    """The methods of a worker that are about adapters."""

    SAVED = (*WeightUpdates.SAVED, "lora_versions")  # in a snapshot

    def __init__(self) -> None:
        super().__init__()
        # How often each adapter has changed; what a KV cache has of an earlier one is outdated.
        self.lora_versions: dict[int, int] = {}
        # Returns adapters that unfinished requests have, where an engine tells it.
        self.lora_users: Callable[[], Collection[int]] | None = None
        self._places: dict[str, Places] | None = None
        # Weights before a merge, and the version of the weights after it.
        self._unmerged: tuple[dict[str, Any], int] | None = None

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Takes an adapter, in place of one with its id; whether there was none.

        Requests at work go on with the new one. Nothing is compiled.

        Raises:
          FileNotFoundError, ValueError: it is no adapter of this model, or none that is supported;
            names what.
          RuntimeError: the engine was not built with enable_lora=True, or `max_cpu_loras` are in
            use.
        """
        request = check_lora_request(lora_request)
        if request is None or not request.has_weights:
            raise ValueError(
                "lora_request must be a LoRARequest with lora_path or lora_tensors, got "
                f"{shown(request)}: add_lora reads its weights"
            )
        runners = self._adapted()
        adapter = self._read_adapter(request)
        known = runners[0].known
        is_new = adapter.lora_id not in known
        if is_new and len(known) == self.runners[0].program.engine.max_cpu_loras:
            self._give_way(runners)
        for adapters in runners:
            adapters.register(adapter)
        self.lora_versions[adapter.lora_id] = self.lora_versions.get(adapter.lora_id, 0) + 1
        return is_new

    def remove_lora(self, lora_id: int) -> bool:
        """Forgets an adapter; whether there was one.

        Raises:
          RuntimeError: unfinished requests have it.
        """
        runners = self._adapted()
        if validate("lora_id", lora_id, _ID) not in runners[0].known:
            return False
        if lora_id in self.loras_in_use():
            raise RuntimeError(f"requests have adapter {lora_id}: abort them, or let them end")
        for adapters in runners:
            adapters.forget(lora_id)
        return True

    def list_loras(self) -> set[int]:
        """Returns the ids of all adapters, on the device or not."""
        return set(self._adapted()[0].known)

    def pin_lora(self, lora_id: int) -> bool:
        """Brings an adapter to the device, where it stays until it is removed.

        Raises:
          ValueError: there is no such adapter, or no place would be left for others.
          RuntimeError: running requests have all places.
        """
        runners = self._adapted()
        validate("lora_id", lora_id, _ID)
        pinned = runners[0].pinned | {lora_id}
        if len(pinned) >= len(runners[0].places):
            raise ValueError(
                f"pin_lora({lora_id}) would leave no place for other adapters, max_loras="
                f"{len(runners[0].places)}: raise max_loras"
            )
        for runner, adapters in zip(self.runners, runners, strict=True):
            adapters.pin(lora_id, runner.requests.lora_ids.values())
        return True

    def merge_lora(self, lora_id: int) -> None:
        """Adds an adapter to the weights, for all requests: steps cost what they cost without.

        What it changes is kept on the host for `unmerge_lora`. A request that names an adapter has
        it besides.

        Raises:
          ValueError: there is no such adapter, or products of the model are quantised.
          RuntimeError: one is merged already, or the weights sleep.
        """
        if self._is_merged:
            raise RuntimeError("an adapter is merged already: call unmerge_lora first")
        adapter = self._adapted()[0].known.get(validate("lora_id", lora_id, _ID))
        if adapter is None:
            raise ValueError(f"lora_id={lora_id} is no adapter that add_lora was given: add it")
        params, before = merge(self._awake(), adapter)
        self._set_params(params)
        self._outdate(weights=True)
        self._unmerged = before, self.weights_version

    def unmerge_lora(self) -> None:
        """Puts the weights back as they were before `merge_lora`, to the bit.

        Raises:
          RuntimeError: none is merged, or the weights have changed since, or sleep.
        """
        if not self._is_merged or self._unmerged is None:
            raise RuntimeError("no adapter is merged, or the weights have changed since")
        params = put_back(self._awake(), self._unmerged[0])
        self._unmerged = None
        self._set_params(params)
        self._outdate(weights=True)

    @property
    def _is_merged(self) -> bool:
        return self._unmerged is not None and self._unmerged[1] == self.weights_version

    def take_lora(self, lora_request: Any) -> int:
        """Returns the id of a request's adapter, 0 for none; reads it if it is not known.

        Raises what `add_lora` does.
        """
        request = check_lora_request(lora_request)
        if request is None:
            return 0
        known = self._adapted()[0].known
        if request.lora_int_id not in known:
            if not request.has_weights:
                raise ValueError(
                    f"lora_request names adapter {request.lora_int_id}, which add_lora was not "
                    f"given, it was given {sorted(known)}: set lora_path"
                )
            self.add_lora(request)
        for adapters in self._adapted():
            adapters.known[request.lora_int_id] = adapters.known.pop(request.lora_int_id)
        return request.lora_int_id

    def _give_way(self, runners: list[DeviceAdapters]) -> None:
        """Forgets the adapter that was asked for least recently, of those that nobody has."""
        held = {*self.loras_in_use(), *runners[0].pinned}
        lora_id = next((i for i in runners[0].known if i not in held), None)
        if lora_id is None:
            raise RuntimeError(
                f"max_cpu_loras={len(runners[0].known)} adapters are all in use or pinned: raise "
                "it, or let requests end"
            )
        for adapters in runners:
            adapters.forget(lora_id)

    def _read_adapter(self, request: LoRARequest) -> Adapter:
        runner = self.runners[0]
        program = runner.program
        source = f"adapter {request.lora_name!r}"
        if request.lora_path is not None:
            config, tensors = read_folder(request.lora_path)
        else:
            assert request.lora_config is not None and request.lora_tensors is not None
            config, tensors = request.lora_config, request.lora_tensors
        if self._places is None:
            self._places = places_of(program.model, program.config)
        names = whole_modules(program.model, program.config)
        held = dict(program.saved)
        config, tensors, saved = take_saved(config, tensors, names, held, source)
        shape = program.dims["V"], program.dims["E"]
        check_saved({names[field]: table for field, table in saved.items()}, shape)
        layers = program.saved_layers
        config, tensors, weights = take_layers(config, tensors, layers, source)
        check_layers(weights, layers, source)
        known = {module for product in program.lora for module in product.modules}
        known |= head_modules(program.config)  # so that `pack` refuses low ranks of theirs
        spare = spare_names(program.model, program.config)
        modules = by_names_of_model(read_adapter(config, tensors, source), known, spare)
        dtype = jnp.dtype(program.engine.dtype)
        matrices = pack(
            program.lora, self._places, modules,
            dtype=dtype, max_rank=program.engine.max_lora_rank,
        )  # fmt: skip
        saved = {field: table.astype(dtype) for field, table in (saved | weights).items()}
        return Adapter(request.lora_name, request.lora_int_id, matrices, saved)

    def loras_in_use(self) -> Collection[int]:
        """Returns the adapters of unfinished requests; without an engine, of those with a slot."""
        if self.lora_users is not None:
            return self.lora_users()
        return {i for runner in self.runners for i in runner.requests.lora_ids.values()}

    def _adapted(self) -> list[DeviceAdapters]:
        """Returns the adapters of all runners."""
        found = [runner.adapters for runner in self.runners]
        if None in found:
            raise RuntimeError("adapters want enable_lora=True: build the engine with it")
        return [adapters for adapters in found if adapters is not None]
