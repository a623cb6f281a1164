"""Methods of a worker besides steps and weight updates: sleep, profiles, health."""

from collections.abc import Iterable

from jaxrunner import pytree
from jaxrunner.api.arguments import checked, forwarded
from jaxrunner.parallel.mesh import devices_of
from jaxrunner.parallel.processes import to_host
from jaxrunner.parallel.requirements import check_links
from jaxrunner.parallel.stages import stages_of
from jaxrunner.program.state import make_state
from jaxrunner.runner.profiling import Profiler, check_device
from jaxrunner.worker import lifecycle_arguments as arguments
from jaxrunner.worker.adapters import Adapters

TAGS = frozenset({"weights", "kv_cache"})  # the parts that sleep and wake


class Lifecycle(Adapters):
    """The methods of vLLM's worker by their names there, but for its steps."""

    @checked(arguments.SLEEP)
    def sleep(self, level: int = 1) -> None:
        """Frees the device's memory until `wake_up`. Compiled programs stay.

        level: 1 keeps the weights on the host, 2 drops them: `update_params` or `reload_weights`
            must follow. KV caches are dropped, and with them all prefixes.

        Raises:
          TypeError, ValueError: there is no such level.
          RuntimeError: requests are at work, or it sleeps.
        """
        runners, status = self.runners, self.status
        if status.sleeping:
            raise RuntimeError(f"{' and '.join(sorted(status.sleeping))} sleep: wake_up first")
        status.check()
        if any(runner.requests.num_taken for runner in runners):
            raise RuntimeError("requests have slots: name them in finished_req_ids, then sleep")
        self._host_params = to_host(self.params) if level == 1 else None
        for runner in runners:
            pytree.delete(runner.state)
            runner.params = runner.state = None
        status.sleeping, status.is_dropped = TAGS, level == 2
        self._outdate(weights=False)

    @checked(arguments.WAKE_UP)
    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Restores what sleeps: "weights", "kv_cache", or all where `tags` is None.

        Raises:
          ValueError: a tag that does not sleep.
        """
        sleeping = self.status.sleeping
        wanted = sleeping if tags is None else frozenset(tags)
        if wanted - sleeping:
            asleep, rest = sorted(sleeping), sorted(wanted - sleeping)
            raise ValueError(f"tags may name what sleeps, {asleep}, got {rest}")
        if "kv_cache" in wanted:
            for runner in self.runners:
                runner.state = make_state(runner.program)
            self.status.sleeping -= {"kv_cache"}
        if "weights" in wanted and self._host_params is not None:
            self._set_params(self._host_params)  # the old ones: prefixes are as they were

    def is_sleeping(self) -> bool:
        """Whether something sleeps, so that no request can be added."""
        return bool(self.status.sleeping)

    start_profile = forwarded("runner.profiler", Profiler.start)
    stop_profile = forwarded("runner.profiler", Profiler.stop)
    profile = forwarded("runner.profiler", Profiler.profile)

    @checked(arguments.CHECK_HEALTH)
    def check_health(self, timeout_s: float = 10.0) -> None:
        """Runs a tiny program on each device, a sum over each mesh, and transfers between stages.

        Raises:
          RuntimeError: one of them did not end in time, or failed.
        """
        for runner in self.runners:
            config = runner.program.config
            for stage in stages_of(config) or (config,):
                check_device(timeout_s, devices_of(stage))
            check_links(config, timeout_s)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Returns the tasks of the model, in vLLM's words."""
        task = getattr(self.runner.program.config, "task", "generate")
        return (task,)
