"""What a worker does beside its steps: new weights, sleep, records."""

import abc
from collections.abc import Iterable
from pathlib import Path

import jax

from jaxrunner import pytree
from jaxrunner.api.arguments import checked
from jaxrunner.program import make_state
from jaxrunner.runner.profiling import check_device
from jaxrunner.worker import lifecycle_arguments as arguments
from jaxrunner.worker.weight_updates import WeightUpdates

TAGS = frozenset({"weights", "kv_cache"})  # what sleeps and wakes


class Lifecycle(WeightUpdates, abc.ABC):
    """The methods of vLLM's worker by their names there, on one runner."""

    def close(self) -> None:
        """Gives the device memory of the state back. May be called twice; no step can follow."""
        self.runner.close()

    @checked(arguments.SLEEP)
    def sleep(self, level: int = 1) -> None:
        """Gives the device's memory to others, until `wake_up`. Programs stay.

        level: 1 keeps the weights on the host, 2 drops them: `update_params` or `reload_weights`
            must follow. KV caches are dropped, and with them all prefixes.

        Raises:
          TypeError, ValueError: there is no such level.
          RuntimeError: requests are at work, or it sleeps.
        """
        runner, status = self.runner, self.status
        if status.sleeping:
            raise RuntimeError(f"{' and '.join(sorted(status.sleeping))} sleep: wake_up first")
        status.check()
        if runner.requests.num_taken:
            raise RuntimeError("requests have slots: name them in finished_req_ids, then sleep")
        self._host_params = jax.device_get(runner.params) if level == 1 else None
        pytree.delete(runner.state)
        runner.params = runner.state = None
        status.sleeping, status.is_dropped = TAGS, level == 2
        self.cache_epoch += 1

    @checked(arguments.WAKE_UP)
    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Takes memory for what sleeps: "weights", "kv_cache", or all where `tags` is None.

        Raises:
          ValueError: a tag that does not sleep.
        """
        sleeping = self.status.sleeping
        wanted = sleeping if tags is None else frozenset(tags)
        if wanted - sleeping:
            asleep, rest = sorted(sleeping), sorted(wanted - sleeping)
            raise ValueError(f"tags may name what sleeps, {asleep}, got {rest}")
        if "kv_cache" in wanted:
            self.runner.state = make_state(self.runner.program)
            self.status.sleeping -= {"kv_cache"}
        if "weights" in wanted and self._host_params is not None:
            self._set_params(self._host_params)  # the old ones: prefixes are as they were

    def is_sleeping(self) -> bool:
        """Whether something sleeps, so that no request can be added."""
        return bool(self.status.sleeping)

    @checked(arguments.IN_FOLDER)
    def start_profile(self, folder: str | Path) -> None:
        """Records what host and device do, until `stop_profile`; steps are named as vLLM's.

        Raises:
          RuntimeError: it records already.
        """
        self.runner.profiler.start(folder)

    def stop_profile(self) -> Path:
        """Ends the record. Returns the file that ui.perfetto.dev opens.

        Raises:
          RuntimeError: nothing is recorded.
        """
        return self.runner.profiler.stop()

    @checked(arguments.PROFILE)
    def profile(self, is_start: bool = True, profile_prefix: str | Path | None = None) -> None:
        """Starts or ends a record, by vLLM's name; see `Profiler.profile`."""
        self.runner.profiler.profile(is_start, profile_prefix)

    @checked(arguments.CHECK_HEALTH)
    def check_health(self, timeout_s: float = 10.0) -> None:
        """Runs a tiny program on the device.

        Raises:
          RuntimeError: it did not end in time, or failed.
        """
        check_device(timeout_s)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Returns what the model can be asked for."""
        return ("generate",)
