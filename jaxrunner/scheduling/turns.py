"""The requests that run in a pipeline's next step, so that all stages are busy. Knows no JAX.

As many steps are under way as there are stages. A request's next step needs the token of its last
one, which has to leave the last stage first; steps of other requests run in between.
"""

from collections import Counter
from collections.abc import Sequence

from jaxrunner.scheduling.request import Request


class Turns:
    """Shares steps out over requests. Any request may be in any step."""

    def __init__(self, num: int):
        """num: stages, at least 2."""
        self._num, self._now = num, 0
        self._last: dict[Request, int] = {}  # the turn of each one's last step

    def next(self, running: Sequence[Request], num_new: int) -> tuple[list[Request], int]:
        """Returns the running requests of the next step, and how many may start in it.

        num_new: requests that could start. Those that ran longest ago come first, and no more than
        an even share: the others have their turn next, which levels what has become uneven.
        """
        last = {request: self._last.get(request, self._now) for request in running}
        due = list[Request]()
        for _ in range(self._num):  # a turn of nobody takes no time
            self._now += 1
            due = [r for r, turn in last.items() if turn + self._num <= self._now and r.num_missing]
            if due or num_new:
                break
        share = self._share(Counter(last.values()), len(last) + num_new)
        due = sorted(due, key=last.__getitem__)[:share]
        self._last = last | dict.fromkeys(due, self._now)
        return due, min(num_new, share - len(due))

    def _share(self, sizes: Counter[int], total: int) -> int:
        """Returns the most requests of this turn. sizes: of steps, by their turns."""
        share, more = divmod(total, self._num)
        under_way = (size for turn, size in sizes.items() if turn + self._num > self._now)
        return share + (sum(size > share for size in under_way) < more)
