"""Translates `StructuredOutputsParams` to grammars of llguidance. Knows no JAX."""

from typing import Any

from jaxrunner.api import ebnf, structural_tag
from jaxrunner.api.structural_tag_format import lark_string
from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.text import grammar_trial

# Between JSON's tokens: a line break with its indentation, or a space. Unbounded whitespace is
# where a model, or a random walk, gets lost.
WHITESPACE = r"\r?\n[ \t]{0,32}| ?"


def grammar_source(params: StructuredOutputsParams) -> str:
    """Returns what llguidance calls a grammar."""
    matcher = grammar_trial.llguidance().LLMatcher
    if params.kind == "regex":
        return matcher.grammar_from_regex(params.regex)
    if params.kind == "grammar":
        return matcher.grammar_from_lark(ebnf.to_lark(params.grammar or ""))
    if params.kind == "choice":
        # One terminal: alternatives of a rule are limited to 2000.
        choices = " | ".join(map(lark_string, params.choice or ()))
        return matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    whitespace = "" if params.disable_any_whitespace else params.whitespace_pattern or WHITESPACE
    # All four, so that no `x-guidance` in a schema decides them.
    options: dict[str, Any] = {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": False,
    }
    options["whitespace_pattern"] = whitespace
    if params.structural_tag is not None:
        return matcher.grammar_from_lark(
            structural_tag.to_lark(str(params.structural_tag), options)
        )
    schema = params.json if params.kind == "json" else '{"type":"object"}'
    return matcher.grammar_from_json_schema(schema, overrides=options)
