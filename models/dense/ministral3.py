"""Ministral 3: Mistral whose queries grow with the position, past the length of training."""

from jaxrunner.config import read_over_0
from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig
from jaxrunner.models.blocks.reading import SLIDING, block, read_block

LEN = "original_max_position_embeddings"


def read(settings: Settings) -> BlockConfig:
    """Reads a Ministral 3 config."""
    scaling = settings.section("rope_parameters") or Settings(
        {}, settings.source, "rope_parameters"
    )
    beta, length = scaling.take("llama_4_scaling_beta", float), scaling.size(LEN)
    given = settings.take("rope_parameters", dict, {})
    # `max_position_embeddings` is there again, where nothing reads it.
    own = ("llama_4_scaling_beta", "max_position_embeddings")
    rest = {key: value for key, value in given.items() if key not in own}
    return read_block(
        settings.with_value("rope_parameters", rest),
        head_dim=128,
        eps=1e-5,
        kinds=(SLIDING,) * settings.size("num_hidden_layers"),
        query_growth=(read_over_0("llama_4_scaling_beta", beta), length),
    )


ministral3 = block._replace(read=read)
