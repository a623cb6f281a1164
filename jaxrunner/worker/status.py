"""The status of a worker: usable in its own process, awake, and not ended."""

import os


class WorkerStatus:
    """Whether a worker can be used: its process, and why it has ended or sleeps."""

    def __init__(self):
        self._process = os.getpid()
        self.ended = ""  # why it has ended; "" while it has not
        self.sleeping: frozenset[str] = frozenset()  # of "weights" and "kv_cache"
        self.is_dropped = False  # whether sleeping weights were dropped, not kept on the host

    @property
    def asleep(self) -> str:
        """Why no request can be added before it wakes up; "" where it is awake."""
        if not self.sleeping:
            return ""
        dropped = ", and update_params or reload_weights, as the weights were dropped"
        is_dropped = self.is_dropped and "weights" in self.sleeping
        return f"{' and '.join(sorted(self.sleeping))} sleep: call wake_up{dropped * is_dropped}"

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked off the worker's: the threads of JAX stayed there."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Refuses calls that would hang, or fail deep inside JAX.

        Raises:
          RuntimeError: the engine is another process's, was closed, or is beyond repair.
        """
        self.check_process()
        if self.ended:
            raise RuntimeError(self.ended)

    def check_awake(self) -> None:
        """Refuses requests. Raises what `check` does, and RuntimeError where the engine sleeps."""
        self.check()
        if self.asleep:
            raise RuntimeError(self.asleep)

    def check_process(self) -> None:
        """Refuses calls from another process.

        Raises:
          RuntimeError: this process was forked off the worker's.
        """
        if self.is_foreign:
            raise RuntimeError(
                f"this engine belongs to process {self._process}, and JAX does not survive a fork: "
                'start processes with multiprocessing\'s "spawn", and build an engine in each'
            )
