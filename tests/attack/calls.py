"""Cases made of functions with named fields: a few of them are given bad values."""

from collections.abc import Callable, Mapping
import random
import re
from typing import Any, NamedTuple

from tests.attack import values
from tests.attack.harness import Case, in_words
from tests.attack.kinds import Kind, draw


class Target(NamedTuple):
    """A function, the fields that are attacked, and good values of those that it needs."""

    name: str
    function: Callable[..., Any]
    kinds: Mapping[str, Kind]
    needed: Callable[[], dict[str, Any]] = dict
    unknown: bool = True  # whether a keyword that is not there is tried too


# Functions of the user may do anything, a bar too.
CALLED = {"use_tqdm", "method", "func"}
UNKNOWN = ("best_of", "top-p", "Seed", "", "self", "tenzor_parallel_size", "x" * 999, "é", "kwargs")


def case(rng: random.Random, targets: tuple[Target, ...]) -> Case:
    """Returns a call of one of the targets, with one bad field or several."""
    target = rng.choice(targets)
    names = rng.sample(list(target.kinds), min(len(target.kinds), rng.choice((1, 1, 1, 2, 3))))
    given = {name: draw(rng, target.kinds[name], values.draw) for name in names}
    for name in CALLED & given.keys():
        if callable(given[name]):
            given[name] = b"yes"
    told = [target.kinds[name].good(value) for name, value in given.items()]
    bad = [name for name, good in zip(names, told, strict=True) if good is not True]
    good = False if False in told else None if None in told else True
    if target.unknown and rng.random() < 0.02:
        name = rng.choice(UNKNOWN)
        given[name], good = values.atom(rng), False
        bad.append(re.escape(name))
    call = target.needed() | given
    return Case(
        lambda: target.function(**call),
        tuple(bad) or tuple(names),
        good,
        in_words(target.name, given),
    )
