"""The most that a checkpoint or a prompt may hold: what is larger is refused before it is read.

Each is several times what any published model has. Knows no JAX.
"""

from collections.abc import Callable
from pathlib import Path

# Of config.json, in tokens, rows or layers.
SIZES = dict(
    num_hidden_layers=1024,
    hidden_size=2**18,
    intermediate_size=2**20,
    num_attention_heads=2**12,
    num_key_value_heads=2**12,
    head_dim=2**12,
    vocab_size=2**22,
    max_position_embeddings=2**30,
)
ANY_SIZE = 2**30  # of a setting that is not among them
JSON_BYTES = 2**26  # of a file with settings, or an index of shards
HEADER_BYTES = 2**25  # of a safetensors file's header
TOKENIZER_BYTES = 2**27  # of tokenizer.json
TOKENIZER_PARTS = 10_000  # of its normalizer, and of each other section that rewrites text
TOKEN_CHARS = 4096  # of one token
PATTERN_CHARS = 16384  # of one regular expression there
PATTERN_TEXT, PATTERN_TIME_S = 4096, 0.3  # characters that its section reads, in so much CPU time
GROWTH = 64  # times that a text becomes longer in a section
TEXT_CHARS = 2**23  # of a prompt; splitting it into tokens takes some 300 bytes a character
SHORT_TEXT = 2**17  # characters that are split without looking at how many fit
MEBI = 2**20


def check_text(text: str, longest: Callable[[], int], max_tokens: int | None = None) -> None:
    """Checks the length of a text before it is split, which takes time and memory.

    longest: returns the characters of the longest token. max_tokens: that there is room for.

    Raises:
      ValueError: it is longer than any text that can be used.
    """
    if len(text) > TEXT_CHARS:
        raise ValueError(
            f"the text has {len(text)} characters, at most {TEXT_CHARS} can be split into tokens: "
            "shorten it, or give token ids"
        )
    if max_tokens is None or len(text) <= SHORT_TEXT or len(text) <= max_tokens * longest():
        return
    raise ValueError(
        f"the text has {len(text)} characters, and {max_tokens} tokens, which are what "
        f"max_model_len leaves room for, have at most {max_tokens * longest()}: shorten it or "
        "raise max_model_len"
    )


def check_bytes(path: Path, most: int) -> None:
    """Checks the size of a file.

    Raises:
      ValueError: it has more than `most` bytes.
    """
    size = path.stat().st_size
    if size > most:
        raise ValueError(
            f"{path} must be at most {most // MEBI} MiB, got {size} bytes: it is none of a model"
        )
