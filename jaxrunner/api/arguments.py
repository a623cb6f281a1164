"""Checks arguments of public functions against tables of bounds. Knows no JAX."""

from collections.abc import Callable, Mapping
import difflib
import functools
import inspect
import operator
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from jaxrunner.api.validation import Bound, shown, validate

P = ParamSpec("P")
T = TypeVar("T")


class Elsewhere(NamedTuple):
    """An argument that vLLM's function of this name has, and ours has not."""

    instead: str  # the advice where another value is wanted
    same: tuple[Any, ...] = (None,)  # the values that ask for what is done anyway
    each: type | None = None  # all values of a type ask for that


def forwarded(
    to: str, method: Callable[Concatenate[Any, P], T]
) -> Callable[Concatenate[Any, P], T]:
    """Returns a method that calls another class's, of the object that an attribute's path names."""
    owner = operator.attrgetter(to)

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(owner(self), *args, **kwargs)

    return call


def checked(
    bounds: Mapping[str, Bound],
    *,
    elsewhere: Mapping[str, Elsewhere] | None = None,
    renamed: Mapping[str, str] | None = None,
    spelled: Mapping[str, Mapping[Any, Any]] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Returns a decorator of methods: what they are called with is as the tables say, or refused.

    bounds: of arguments, which the method gets as `validation.validate` makes them; it may take
        more keywords than it names, those of this table alone.
    elsewhere: vLLM's arguments that the method has not, which do not reach it.
    renamed: our names of vLLM's arguments.
    spelled: other spellings of values, by the names of arguments.

    The method raises, before it starts:
      TypeError: an argument that is not there, with the nearest that is, or one of the wrong type.
      ValueError: one that is out of range, or has an effect in vLLM only; says what to do.
    """
    elsewhere, renamed, spelled = elsewhere or {}, renamed or {}, spelled or {}

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        ours = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} | bounds.keys()
        name, method = function.__qualname__.removesuffix(".__init__"), cast(Any, function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> T:
            given: dict[str, Any] = {}
            for key, value in [*zip(by_place, args[1:], strict=False), *kwargs.items()]:
                if key in elsewhere:
                    check_same(name, key, value, elsewhere[key])
                    continue
                ours_of = renamed.get(key, key)
                if ours_of not in ours:
                    raise TypeError(_unknown(name, key, ours, [*renamed, *elsewhere]))
                if ours_of in given:
                    raise TypeError(f"{name} is given {ours_of} twice: give it once")
                given[ours_of] = _read(key, value, bounds.get(ours_of), spelled.get(ours_of, {}))
            rest = args[1 + len(by_place) :]  # too many, which Python refuses
            return method(args[0], *rest, **given)

        return call

    return decorate


def check_same(name: str, key: str, value: Any, theirs: Elsewhere) -> None:
    """Refuses a value of vLLM's argument that asks for behaviour that is not built in.

    Raises:
      ValueError: it does; says what to do instead.
    """
    if theirs.each is not None and isinstance(value, theirs.each):
        return
    if not any(type(value) is type(one) and value == one for one in theirs.same):
        raise ValueError(f"{name}: {key}={shown(value)} is not supported: {theirs.instead}")


def _read(name: str, value: Any, bound: Bound | None, spellings: Mapping[Any, Any]) -> Any:
    for spelling, meant in spellings.items():
        if type(value) is type(spelling) and value == spelling:
            return meant
    return value if bound is None else validate(name, value, bound)


def _unknown(name: str, key: str, ours: set[str], theirs: list[str]) -> str:
    near = difflib.get_close_matches(key, [*ours, *theirs], n=1, cutoff=0.5)
    cure = f"the nearest is {near[0]!r}" if near else f"it has {', '.join(sorted(ours))}"
    return f"{name} has no argument {shown(key)}: {cure}"
