"""The registry of model families, by the `architectures` entry of a `config.json`."""

from jaxrunner.api.validation import shown
from jaxrunner.config import ModelConfig
from jaxrunner.hf_config import Settings
from jaxrunner.model import Model
from jaxrunner.models.dense.cohere import cohere, cohere2
from jaxrunner.models.dense.exaone4 import exaone4
from jaxrunner.models.dense.gemma import gemma2, gemma3, gemma3_of_two
from jaxrunner.models.dense.glm import glm, glm4
from jaxrunner.models.dense.gpt2 import gpt2
from jaxrunner.models.dense.gpt_neox import gpt_neox
from jaxrunner.models.dense.granite import granite
from jaxrunner.models.dense.ministral3 import ministral3
from jaxrunner.models.dense.mistral3 import mistral3
from jaxrunner.models.dense.olmo import olmo2, olmo3
from jaxrunner.models.dense.phi3 import phi3
from jaxrunner.models.dense.smollm3 import smollm3
from jaxrunner.models.dense.starcoder2 import starcoder2
from jaxrunner.models.encoders.bert import bert, roberta
from jaxrunner.models.encoders.gemma_embedding import gemma_embedding
from jaxrunner.models.encoders.modernbert import modernbert
from jaxrunner.models.hybrids.bamba import bamba
from jaxrunner.models.hybrids.falcon_h1 import falcon_h1
from jaxrunner.models.hybrids.granite_hybrid import granite_hybrid
from jaxrunner.models.hybrids.lfm2 import lfm2
from jaxrunner.models.hybrids.nemotron_h import nemotron_h
from jaxrunner.models.hybrids.qwen3_5 import (
    qwen3_5,
    qwen3_5_moe,
    qwen3_5_moe_of_two,
    qwen3_5_of_two,
)
from jaxrunner.models.hybrids.qwen3_next import qwen3_next
from jaxrunner.models.llama import llama
from jaxrunner.models.mimo import mimo
from jaxrunner.models.mistral import mistral
from jaxrunner.models.mixtures.deepseek import deepseek_v2, deepseek_v3, glm4_moe_lite
from jaxrunner.models.mixtures.glm4_moe import glm4_moe
from jaxrunner.models.mixtures.gpt_oss import gpt_oss
from jaxrunner.models.mixtures.granite_moe import granite_moe
from jaxrunner.models.mixtures.llama4 import llama4, llama4_of_two
from jaxrunner.models.mixtures.mixtral import mixtral
from jaxrunner.models.mixtures.olmoe import olmoe
from jaxrunner.models.mixtures.qwen2_moe import qwen2_moe
from jaxrunner.models.mixtures.qwen3_moe import qwen3_moe
from jaxrunner.models.qwen2 import qwen2
from jaxrunner.models.qwen3 import qwen3

FAMILIES: dict[str, Model] = {
    "BambaForCausalLM": bamba,
    "BertModel": bert,
    "Cohere2ForCausalLM": cohere2,
    "CohereForCausalLM": cohere,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "Exaone4ForCausalLM": exaone4,
    "FalconH1ForCausalLM": falcon_h1,
    "GPT2LMHeadModel": gpt2,
    "GPTNeoXForCausalLM": gpt_neox,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma3ForConditionalGeneration": gemma3_of_two,
    "Gemma3TextModel": gemma_embedding,
    "Glm4ForCausalLM": glm4,
    "Glm4MoeForCausalLM": glm4_moe,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite,
    "GlmForCausalLM": glm,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": granite,
    "GraniteMoeForCausalLM": granite_moe,
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "Lfm2ForCausalLM": lfm2,
    "Llama4ForCausalLM": llama4,
    "Llama4ForConditionalGeneration": llama4_of_two,
    "LlamaForCausalLM": llama,
    "MiMoForCausalLM": mimo,
    "Ministral3ForCausalLM": ministral3,
    "Mistral3ForConditionalGeneration": mistral3,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "ModernBertModel": modernbert,
    "NemotronHForCausalLM": nemotron_h,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "OlmoeForCausalLM": olmoe,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5ForConditionalGeneration": qwen3_5_of_two,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe_of_two,
    "RobertaModel": roberta,
    "SmolLM3ForCausalLM": smollm3,
    "Starcoder2ForCausalLM": starcoder2,
    "XLMRobertaModel": roberta,
}


def register_model(architecture: str, model: Model) -> None:
    """Lets checkpoints whose config.json names `architecture` be read as `model`.

    Raises:
      ValueError: another model has that name.
    """
    if FAMILIES.setdefault(architecture, model) != model:
        raise ValueError(
            f"architecture {architecture!r} is served by another model: register yours under a "
            "name of its own, and put that into config.json or hf_overrides"
        )


def read_model(settings: Settings) -> tuple[Model, ModelConfig]:
    """Returns the family and the config of a checkpoint.

    Raises:
      ValueError: an architecture we do not have, or a setting that we do not support.
    """
    try:
        names = settings.each("architectures", str, [])
        known = [name for name in names if name in FAMILIES]
        if len(names) != 1 or not known:
            raise ValueError(f"architectures must be one of {sorted(FAMILIES)}, got {shown(names)}")
        model = FAMILIES[known[0]]
        return model, model.read(settings)
    except ValueError as error:
        if settings.source in str(error):
            raise
        raise ValueError(f"{settings.source}: {error}") from error
