"""A lowered program on its way to an executable."""

import threading
from typing import Any


class Build:
    """A lowered program on its way to an executable."""

    def __init__(self, lowered: Any, options: dict[str, str]):
        self._lowered: Any = lowered
        self._options = options
        self._executable: Any = None
        self._lock = threading.Lock()

    @property
    def executable(self) -> Any:
        """The executable; compiles when first read, once."""
        with self._lock:
            if self._executable is None:
                self._executable = self._lowered.compile(self._options)
                self._lowered = None
            return self._executable
