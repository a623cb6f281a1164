"""Grammars as vLLM's examples write them, EBNF, in Lark's words. Knows no JAX."""

import re

from jaxrunner.api.validation import shown

MAX_EBNF_BYTES = 2**13  # of a grammar in EBNF: its translation takes time by the square
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def is_ebnf(grammar: str) -> bool:
    """Whether a grammar has a rule as in `root ::= "yes" | "no"`."""
    return _RULE.search(grammar) is not None


def to_lark(grammar: str) -> str:
    """Returns a grammar in Lark, translated by llguidance where it is in EBNF.

    Raises:
      ValueError: it is no such grammar.
    """
    if not is_ebnf(grammar):
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # it raises bare ones, and recurses
        raise ValueError(f"its EBNF cannot be read: {shown(str(error))}") from error
