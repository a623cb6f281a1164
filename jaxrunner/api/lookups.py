"""Settings of methods that look drafts up: bounds, and vLLM's defaults.

Knows no JAX.
"""

from collections.abc import Mapping
from typing import Any

MAX_NGRAM = 32
NGRAM = 5  # tokens of an n-gram
MAX_DEPTH = 64  # tokens of a match of suffixes and its drafts
MAX_CORPUS = 2**20  # tokens of ended requests that are searched in each step
SUFFIX: dict[str, int | float] = dict(  # the tokens alone are no number of vLLM's
    suffix_decoding_max_tree_depth=24,
    suffix_decoding_max_cached_tokens=65536,
    suffix_decoding_max_spec_factor=1.0,
    suffix_decoding_min_token_prob=0.1,
)


def ngram_sizes(low: int | None, high: int | None) -> dict[str, int]:
    """Returns the sizes of n-grams by their keys; of one that is not said, the other's.

    Raises:
      ValueError: no length is between them.
    """
    low, high = low or high or NGRAM, high or low or NGRAM
    if low > high:
        raise ValueError(
            f"speculative_config.prompt_lookup_min={low} exceeds prompt_lookup_max={high}: lower it"
        )
    return dict(prompt_lookup_min=low, prompt_lookup_max=high)


def suffix_sizes(given: Mapping[str, Any], num_drafts: int) -> dict[str, int | float]:
    """Returns what suffixes are looked up by, completed where `given` has None.

    Raises:
      ValueError: a match with as many drafts has no token.
    """
    sizes = SUFFIX | {name: value for name, value in given.items() if value is not None}
    depth = sizes["suffix_decoding_max_tree_depth"]
    if depth <= num_drafts:
        raise ValueError(
            f"speculative_config.suffix_decoding_max_tree_depth={depth} holds {num_drafts} drafts "
            f"and no token that they follow: take more than {num_drafts}"
        )
    return sizes
