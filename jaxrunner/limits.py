"""The most that a checkpoint or a prompt may hold: what is larger is refused before it is read.

Each is several times what any published model has. Knows no JAX.
"""

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
MEBI = 2**20


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
