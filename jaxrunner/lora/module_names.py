"""Names of modules as a trainer has them, and as a model's file has them."""

from collections.abc import Collection, Mapping, Sequence
import re
from typing import TypeVar

from jaxrunner.api.validation import shown

T = TypeVar("T")
# The modules around the layers: a class for texts and one that sees have others, and so has a
# file. A class that pools may have none.
WRAPPERS = re.compile(r"((model|language_model|backbone|bert|roberta|transformer|gpt_neox)\.)+")


def by_names_of_model(
    modules: Mapping[str, T], known: Collection[str], spare: Sequence[str] = ()
) -> dict[str, T]:
    """Returns an adapter's modules by the names that they have in the model's file.

    A name that the file does not have is looked for without the `WRAPPERS` that it begins with;
    one that is not found either stays. Modules of a tower are left out, as prompts are texts.

    known: of the model. spare: what names of tensors begin with that the model does not read.

    Raises:
      ValueError: two modules have the name of one, or a name is that of two; names them.
    """
    short: dict[str, list[str]] = {}
    for name in known:
        short.setdefault(_short(name), []).append(name)
    unread = tuple(_short(start) for start in spare)
    found: dict[str, tuple[str, T]] = {}
    for name, of in modules.items():
        named = [name] if name in known else short.get(_short(name), [])
        if len(named) > 1:
            raise ValueError(
                f"the adapter's module {shown(name)} may be each of {named}: name one of these"
            )
        if not named and unread and _short(name).startswith(unread):
            continue
        own = named[0] if named else name
        if own in found:
            raise ValueError(
                f"the adapter's modules {shown(found[own][0])} and {shown(name)} are both {own} of "
                "the model: take one of them out"
            )
        found[own] = name, of
    return {own: of for own, (_, of) in found.items()}


def _short(name: str) -> str:
    return WRAPPERS.sub("", name, count=1) if WRAPPERS.match(name) else name
