"""Cuts a program into parts, for a CPU, where compiling is slow.

XLA inlines or copies every call of a jitted function, so a step of 30 equal layers takes 30 times
as long to compile as one layer. Here the jaxpr is cut at these calls. The equations before the
calls, the called function, and the equations behind them become one executable each. Sampling is a
part too: it is equal in all programs with as many rows, whatever their tokens.
"""

from collections import Counter
from collections.abc import Sequence
import itertools
from typing import Any, NamedTuple

import jax
from jax.extend import core
import numpy as np

from jaxrunner.device.parts.parts import Launch, LoweredParts, Part, Wiring

# Least number of equal calls, and of operations in each, for which cutting is worth it.
LEAST_CALLS, LEAST_OPERATIONS = 12, 10
MOST_REST = 5  # parts other than calls and sampling; with more, launches cost more than is saved
SCOPES = "draw", "finish"  # of sampling, as `jax.named_scope` has them


def cut(traced: Any) -> LoweredParts | None:
    """Returns a traced program in parts; None where it has too few equal calls.

    traced: a `jax.stages.Traced`.
    """
    closed = traced.jaxpr
    pieces = _pieces(closed.jaxpr)
    if closed.effects or pieces is None:
        return None
    given = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
    number = {var: i for i, var in enumerate(given)}
    constants = [np.asarray(x) for x in closed.consts]
    # A literal is a constant too, so that calls which differ in it are equal.
    literals: dict[int, int] = {}
    for var in _literals(pieces, closed.jaxpr.outvars):
        literals[id(var)] = len(given) + len(literals)
        constants.append(np.asarray(var.val, var.aval.dtype))
    num_values = len(given) + len(literals)

    def numbered(var: Any) -> int:
        return literals[id(var)] if isinstance(var, core.Literal) else number[var]

    bound: list[tuple[Any, tuple[int, ...], tuple[int, ...]]] = []
    for piece in pieces:
        takes = tuple(map(numbered, piece.takes))
        number |= {var: num_values + i for i, var in enumerate(piece.gives)}
        bound.append((piece, takes, tuple(number[var] for var in piece.gives)))
        num_values += len(piece.gives)
    results = tuple(map(numbered, closed.jaxpr.outvars))
    read = Counter(i for _, takes, _ in bound for i in set(takes)) + Counter(results)
    donated = [i for i, leaf in enumerate(jax.tree.leaves(traced.args_info)) if leaf.donated]
    free = {i for i in donated if i not in results}
    return _joined(bound, read, free, constants, num_values, results, traced)


class _Piece(NamedTuple):
    """Equations that run together."""

    closed: Any  # a jaxpr, the same object where calls are equal
    takes: Sequence[Any]
    gives: Sequence[Any]


def _joined(
    bound: list[tuple[_Piece, tuple[int, ...], tuple[int, ...]]], read: Counter, free: set[int],
    constants: list[Any], num_values: int, results: tuple[int, ...], traced: Any,
) -> LoweredParts:  # fmt: skip
    """Returns pieces as parts. A part donates those values of `free` that it reads last.

    bound: each piece with the numbers of its arguments and results. read: readers of each value.
    """
    launches, index, donations = [], dict[int, int](), list[tuple[Any, set[int]]]()
    for piece, takes, gives in bound:
        read -= Counter(set(takes))
        last = tuple(i for i in dict.fromkeys((*takes, *gives)) if not read[i])
        program = index.setdefault(id(piece.closed), len(index))
        launches.append(Launch(program, takes, gives, last))
        given = {at for at, i in enumerate(takes) if i in free and i in last}
        if program == len(donations):
            donations.append((piece.closed, given))
        else:
            donations[program][1].intersection_update(given)
    parts = [Part(closed, _in_place(closed.jaxpr, given)) for closed, given in donations]
    wiring = Wiring(tuple(launches), num_values, results)
    return LoweredParts(parts, wiring, constants, jax.tree.structure(traced.out_info))


def _pieces(jaxpr: Any) -> list[_Piece] | None:
    """Returns the pieces of a jaxpr in their order; None where cutting is not worth it."""
    eqns = _read_eqns(jaxpr)
    count = Counter(id(eqn.params["jaxpr"]) for eqn in eqns if _is_call(eqn))
    often = {key for key, num in count.items() if num >= LEAST_CALLS}

    def own_part(eqn: Any) -> Any:
        if _is_call(eqn) and id(eqn.params["jaxpr"]) in often:
            return id(eqn)
        return "sampling" if _scope(eqn) in SCOPES else None

    # Every other equation runs right after the last own part that it depends on.
    behind: dict[Any, int] = {}
    own, rest = list[Any](), {0: list[Any]()}
    for key, run in itertools.groupby(eqns, own_part):
        if key is not None:
            own.append([*run])
            behind |= {v: len(own) for eqn in own[-1] for v in eqn.outvars}
            continue
        for eqn in run:
            at = max((behind.get(v, 0) for v in _variables(eqn)), default=0)
            rest.setdefault(at, []).append(eqn)
            behind |= dict.fromkeys(eqn.outvars, at)
    if not often or sum(map(bool, rest.values())) > MOST_REST:
        return None
    groups = [rest[0]]
    for at, eqns in enumerate(own, 1):
        groups += [eqns, rest.get(at, [])]
    read = [{v for eqn in eqns for v in _variables(eqn)} for eqns in groups]
    read.append({v for v in jaxpr.outvars if not isinstance(v, core.Literal)})
    return [
        _piece(jaxpr, eqns, set[Any]().union(*read[:i], *read[i + 1 :]))
        for i, eqns in enumerate(groups)
        if eqns
    ]


def _read_eqns(jaxpr: Any) -> list[Any]:
    """Returns the equations, in their order, whose results something reads."""
    read = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if not read.isdisjoint(eqn.outvars):
            kept.append(eqn)
            read.update(_variables(eqn))
    return kept[::-1]


def _piece(jaxpr: Any, eqns: list[Any], needed: set[Any]) -> _Piece:
    """Returns equations as a piece with the results in `needed`; a call keeps its own jaxpr."""
    if len(eqns) == 1 and _is_call(eqns[0]):
        return _Piece(eqns[0].params["jaxpr"], eqns[0].invars, eqns[0].outvars)
    return _rest(jaxpr, eqns, needed)


def _rest(jaxpr: Any, eqns: list[Any], needed: set[Any]) -> _Piece:
    """Returns equations as a new jaxpr with the results in `needed`."""
    made = {v: None for eqn in eqns for v in eqn.outvars}
    takes = list(dict.fromkeys(v for eqn in eqns for v in _variables(eqn) if v not in made))
    gives = [v for v in made if v in needed]
    own = jaxpr.replace(
        constvars=[], invars=takes, outvars=gives, eqns=eqns, debug_info=_debug(jaxpr, takes, gives)
    )
    return _Piece(core.ClosedJaxpr(own, []), takes, gives)


def _debug(jaxpr: Any, takes: list[Any], gives: list[Any]) -> Any:
    info = jaxpr.debug_info
    return info._replace(arg_names=("",) * len(takes), result_paths=("",) * len(gives))


def _is_call(eqn: Any) -> bool:
    return eqn.primitive.name in ("jit", "pjit") and (
        len(eqn.params["jaxpr"].jaxpr.eqns) >= LEAST_OPERATIONS
    )


def _scope(eqn: Any) -> str | None:
    """Returns the name of the outermost scope that an equation is in."""
    stack = eqn.source_info.name_stack.stack
    return getattr(stack[0], "name", None) if stack else None


def _variables(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, core.Literal)]


def _literals(pieces: list[_Piece], outvars: Sequence[Any]) -> list[Any]:
    found = [v for piece in pieces for v in piece.takes] + [*outvars]
    return [v for v in found if isinstance(v, core.Literal)]


def _in_place(jaxpr: Any, given: set[int]) -> tuple[int, ...]:
    """Returns the indices in `given` whose argument an output of equal shape can overwrite."""
    room = Counter((v.aval.shape, v.aval.dtype) for v in jaxpr.outvars)
    kept = []
    for at in sorted(given):
        kind = jaxpr.invars[at].aval.shape, jaxpr.invars[at].aval.dtype
        if room[kind]:
            room[kind] -= 1
            kept.append(at)
    return tuple(kept)
