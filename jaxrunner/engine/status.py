"""Whether an engine can be used: by the process that made it, awake, until it has ended."""

import os


class EngineStatus:
    """Whether an engine can be used: its process, and why it has ended or sleeps."""

    def __init__(self):
        self._process = os.getpid()
        self.ended = ""  # why it has
        self.asleep = ""  # why no request can be added before it wakes up

    @property
    def is_foreign(self) -> bool:
        """Whether this process was forked off the engine's: the threads of JAX stayed there."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Refuses what would hang, or end in the depths of JAX.

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
        """Refuses another process.

        Raises:
          RuntimeError: it is one.
        """
        if self.is_foreign:
            raise RuntimeError(
                f"this engine belongs to process {self._process}, and JAX does not survive a fork: "
                'start processes with multiprocessing\'s "spawn", and build an engine in each'
            )
