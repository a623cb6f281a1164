"""Configurations of a scheduler under random loads."""

from dataclasses import dataclass

from jaxrunner.caches.cache_group import CacheGroup
from tests.support.scheduling import cache_group, state_group


@dataclass(frozen=True)
class Load:
    """A scheduler's configuration, and how far it runs ahead of the device."""

    depth: int = 1
    policy: str = "fcfs"
    groups: tuple[CacheGroup, ...] = (cache_group(4),)
    num_blocks: int = 20
    max_num_seqs: int = 6
    budget: int = 16
    threshold: int = 0
    max_model_len: int = 48
    caching: bool = True
    sizes: tuple[int, ...] = ()
    num_steps: int = 1
    num_drafts: int = 0
    adaptive: bool = False
    remote: bool = False
    num_stages: int = 1

    @property
    def has_copies(self) -> bool:
        """Whether a prefix may end inside a block."""
        return all(group.kind.has_prefixes for group in self.groups)


FULL, WINDOW = cache_group(4), cache_group(4, window=9)
STATES = state_group(8, 9)
LOADS = {
    "sync": Load(),
    "sync priority": Load(policy="priority", num_blocks=14),
    "async": Load(depth=2),
    "async tiny pool": Load(depth=2, num_blocks=12),
    "async priority": Load(depth=2, policy="priority", num_blocks=14),
    "async three deep": Load(depth=3, num_blocks=14, threshold=5),
    "three deep priority": Load(depth=3, policy="priority", num_blocks=13, budget=9),
    "window": Load(depth=2, groups=(WINDOW,), num_blocks=13),
    "window of one": Load(depth=3, groups=(cache_group(2, window=1), FULL), num_blocks=16),
    "tightest window": Load(depth=2, groups=(cache_group(2, window=3),), num_blocks=5, budget=6),
    "window and full": Load(depth=2, groups=(FULL, WINDOW), policy="priority", num_blocks=16),
    "few blocks of a window": Load(depth=2, groups=(FULL, cache_group(4, 5, 12)), num_blocks=24),
    "two block sizes": Load(depth=3, groups=(cache_group(2, window=6), FULL), num_blocks=26),
    "no caching": Load(depth=2, num_blocks=14, caching=False),
    "filled sizes": Load(depth=2, num_blocks=16, sizes=(4, 8, 16), max_num_seqs=4),
    "steps": Load(num_steps=4),
    "steps, async, tiny pool": Load(depth=2, num_steps=3, num_blocks=12),
    "steps in windows": Load(depth=3, num_steps=5, groups=(FULL, WINDOW), num_blocks=16),
    "steps, filled sizes": Load(depth=2, num_steps=2, sizes=(3, 9, 16), num_blocks=14),
    "drafts": Load(num_drafts=3),
    "drafts, async, tiny pool": Load(depth=2, num_drafts=3, num_blocks=12),
    "drafts, three deep, priority": Load(depth=3, num_drafts=2, policy="priority", num_blocks=14),
    "drafts in windows": Load(depth=3, num_drafts=3, groups=(FULL, WINDOW), num_blocks=16),
    "drafts in tightest window": Load(
        depth=2, num_drafts=3, groups=(cache_group(2, window=3),), num_blocks=5, budget=6
    ),
    "one draft, small budget": Load(depth=2, num_drafts=1, budget=7, threshold=5, num_blocks=14),
    "drafts, filled sizes": Load(depth=2, num_drafts=2, sizes=(4, 8, 16), num_blocks=16),
    "drafts, no caching": Load(depth=2, num_drafts=4, caching=False, num_blocks=14),
    "drafts in steps": Load(depth=2, num_drafts=2, num_steps=3, num_blocks=14),
    "adaptive drafts": Load(depth=2, num_drafts=3, num_blocks=14, adaptive=True),
    "adaptive drafts in steps, remote": Load(
        depth=3, num_drafts=3, num_steps=2, adaptive=True, remote=True, num_blocks=14
    ),
    "turns of two": Load(depth=4, num_stages=2, num_blocks=14),
    "turns of four, windows, priority": Load(
        depth=4, num_stages=4, groups=(FULL, WINDOW), policy="priority", num_blocks=16
    ),
    "turns of three, sync, filled sizes": Load(
        num_stages=3, sizes=(4, 8, 16), num_blocks=14, max_num_seqs=4
    ),
    "turns of two, remote, tiny pool": Load(depth=3, num_stages=2, remote=True, num_blocks=12),
    "remote": Load(remote=True),
    "remote, async, tiny pool": Load(depth=2, remote=True, num_blocks=12),
    "remote, priority, no caching": Load(
        depth=3, remote=True, policy="priority", num_blocks=14, caching=False
    ),
    "remote, windows": Load(depth=2, remote=True, groups=(FULL, WINDOW), num_blocks=16),
    "remote, tightest window": Load(
        depth=2, remote=True, groups=(cache_group(2, window=3),), num_blocks=5, budget=6
    ),
    "remote, steps, drafts": Load(
        depth=2, remote=True, num_steps=3, num_drafts=2, sizes=(4, 8, 16), num_blocks=14
    ),
    "drafts in steps, windows": Load(depth=3, num_drafts=1, num_steps=4, groups=(FULL, WINDOW)),
    "states": Load(groups=(FULL, STATES)),
    "states, async, priority": Load(
        depth=2, groups=(STATES, FULL), policy="priority", num_blocks=16
    ),
    "few states": Load(depth=3, groups=(FULL, state_group(4, 5)), budget=13),
    "states, windows, steps": Load(
        depth=2, num_steps=3, groups=(FULL, WINDOW, state_group(8, 12)), num_blocks=16
    ),
    "states, drafts": Load(depth=2, num_drafts=3, groups=(FULL, STATES), num_blocks=14),
    "states, drafts in steps": Load(
        depth=3, num_drafts=2, num_steps=3, groups=(FULL, state_group(4, 9)), num_blocks=16
    ),
    "states, adaptive drafts": Load(
        depth=2, num_drafts=3, groups=(FULL, WINDOW, state_group(4, 9)), adaptive=True
    ),
    "two kinds of states, filled sizes": Load(
        depth=2, groups=(STATES, FULL, state_group(8, 7)), sizes=(4, 8, 16), num_blocks=16
    ),
}
# Each mechanism once, beside others; the rest are slow, of half the steps.
QUICK = (
    "async priority", "window and full", "two block sizes", "no caching", "filled sizes",
    "steps, async, tiny pool", "drafts, async, tiny pool", "drafts in tightest window",
    "adaptive drafts in steps, remote", "turns of four, windows, priority", "remote, steps, drafts",
    "states, async, priority", "states, windows, steps", "states, drafts",
)  # fmt: skip
