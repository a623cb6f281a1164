"""The layers that make scores of each token: rewards of steps of reasoning, classes of words."""

from jaxrunner.heads.classify import classifier, num_labels
from jaxrunner.heads.dense import DenseConfig
from jaxrunner.hf_config import Settings


def rewards(architecture: str, settings: Settings, width: int) -> tuple[DenseConfig, ...]:
    """Returns the layers of a model that scores each token, as Qwen2.5-Math's reward models."""
    one = architecture.endswith("ForRewardModel")
    num = settings.size("num_labels", 1 if one else 2)
    return (
        DenseConfig("score.0", width, width, activation="relu"),
        DenseConfig("score.2", width, num),
    )


def token_classes(base: str, settings: Settings, width: int) -> tuple[DenseConfig, ...]:
    """Returns the layers of a model `ForTokenClassification`; `base` as `classifier` has it."""
    if base == "ModernBertModel":
        return classifier(base, settings, width)[1]
    name = "score" if base.endswith("ForCausalLM") else "classifier"
    return (DenseConfig(name, width, num_labels(settings)),)
