"""Work that may hang, for so long and no longer. Knows no JAX."""

from collections.abc import Callable
import queue
import threading
from typing import Any


def ends_within(timeout_s: float, run: Callable[[], Any]) -> bool:
    """Runs a function in a thread of its own. Whether it ended in time; raises what it raises."""
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            run()
            ended.put(None)
        except Exception as error:  # whatever a broken device makes JAX raise
            ended.put(error)

    # A daemon: where the device hangs, so does the thread, and must not keep the process.
    threading.Thread(target=work, daemon=True).start()
    try:
        error = ended.get(timeout=timeout_s)
    except queue.Empty:
        return False
    if error is not None:
        raise error
    return True
