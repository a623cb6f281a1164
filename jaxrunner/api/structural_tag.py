"""Text with tags in it, such as calls of functions, whose insides follow schemas. Knows no JAX.

{"triggers": ["<function="], "structures": [
    {"begin": "<function=add>", "schema": {...}, "end": "</function>"}]}

Text is free until it says a trigger; what follows is then one of the structures that begin so.
{"format": {...}} says more, as `structural_tag_format` reads it.
"""

from collections.abc import Mapping
import json
from typing import Any

from jaxrunner.api import structural_tag_format
from jaxrunner.api.validation import shown

KEYS = ("begin", "schema", "end")


def check(tag: Any) -> None:
    """Checks a tag that JSON holds.

    Raises:
      TypeError, ValueError: a part of it is missing or bad; names it.
    """
    name = "structured_outputs.structural_tag"
    if isinstance(tag, dict) and tag.keys() - {"type"} == {"format"}:
        return structural_tag_format.check(tag["format"], f"{name}.format")
    if not isinstance(tag, dict) or tag.keys() - {"type"} != {"structures", "triggers"}:
        raise ValueError(
            f"{name} must be a dict with 'format', or with 'structures' and 'triggers', got "
            f"{shown(tag)}"
        )
    triggers, structures = tag["triggers"], tag["structures"]
    if not _is_list(triggers, str) or not all(triggers):
        raise TypeError(f"{name}.triggers must be a list of texts, got {shown(triggers)}")
    if not _is_list(structures, dict):
        raise TypeError(f"{name}.structures must be a list of dicts, got {shown(structures)}")
    for i, one in enumerate(structures):
        place = f"{name}.structures[{i}]"
        kinds: dict[str, type] = dict(begin=str, schema=dict, end=str)
        if one.keys() != set(KEYS) or not all(isinstance(one[k], kinds[k]) for k in KEYS):
            raise TypeError(
                f"{place} must have a 'begin' and an 'end' that are texts, and a 'schema' that is "
                f"a dict, got {shown(one)}"
            )
        if not one["begin"].startswith(tuple(triggers)):
            raise ValueError(
                f"{place} begins with {shown(one['begin'])}, which no trigger of "
                f"{shown(triggers)} starts: add one"
            )


def to_lark(text: str, whitespace: Mapping[str, Any]) -> str:
    """Returns the grammar of a tag that was checked. whitespace: llguidance's options of JSON."""
    from llguidance import StructTag

    tag = json.loads(text)
    if "format" in tag:
        return structural_tag_format.to_lark(tag["format"], whitespace)
    tags = [
        StructTag(
            trigger=next(t for t in tag["triggers"] if one["begin"].startswith(t)),
            begin=one["begin"],
            grammar=one["schema"] | {"x-guidance": dict(whitespace)},
            end=one["end"],
        )
        for one in tag["structures"]
    ]
    return StructTag.to_grammar(tags, assume_special=False)  # special tokens are never allowed


def _is_list(values: Any, kind: type) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(v, kind) for v in values)
