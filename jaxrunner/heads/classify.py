"""The layers that make scores of classes, by what a checkpoint is called."""

from dataclasses import replace

from jaxrunner.heads.dense import DenseConfig
from jaxrunner.hf_config import Settings

ACTIVATIONS = ("gelu", "silu", "relu", "tanh")


def classifier(base: str, settings: Settings, width: int) -> tuple[str, tuple[DenseConfig, ...]]:
    """Returns the pooling and the layers of a model `ForSequenceClassification`.

    base: the architecture of the model below; width: of its hidden states.

    Raises:
      ValueError: a setting that is not supported; names it.
    """
    num = num_labels(settings)
    if base == "BertModel":
        pooler = DenseConfig("bert.pooler.dense", width, width, activation="tanh")
        return "CLS", (pooler, DenseConfig("classifier", width, num))
    if base in ("RobertaModel", "XLMRobertaModel"):
        inner = DenseConfig("classifier.dense", width, width, activation="tanh")
        return "CLS", (inner, DenseConfig("classifier.out_proj", width, num))
    if base == "ModernBertModel":
        settings.expect("classifier_activation", *ACTIVATIONS)
        inner = DenseConfig(
            "head.dense", width, width,
            bias=settings.take("classifier_bias", bool, False),
            activation=settings.take("classifier_activation", str, "gelu"),
            norm="head.norm",
            norm_bias=settings.take("norm_bias", bool, False),
            eps=settings.take("norm_eps", float, 1e-5),
        )  # fmt: skip
        settings.expect("classifier_pooling", "cls", "mean")
        pooling = settings.take("classifier_pooling", str, "cls").upper()
        return pooling, (inner, DenseConfig("classifier", width, num))
    return "LAST", (DenseConfig("score", width, num, bias=False),)


def from_tokens(settings: Settings, ids: tuple[int, ...], width: int) -> tuple[DenseConfig, ...]:
    """Returns the layer of a decoder that says its scores by tokens, "no" and "yes" of a reranker.

    ids: the tokens; of two, the score is what the logit of the second has over that of the first.
    """
    (layer,) = logits_of(settings, ids, width)
    return (replace(layer, outputs=1 if len(ids) == 2 else len(ids)),)


def logits_of(settings: Settings, ids: tuple[int, ...], width: int) -> tuple[DenseConfig, ...]:
    """Returns the layer of a decoder whose scores are the logits of some tokens."""
    tied = settings.take("tie_word_embeddings", bool, False)
    return (
        DenseConfig(
            "model.embed_tokens" if tied else "lm_head", width, len(ids),
            bias=False, rows=ids, vocab_size=settings.size("vocab_size"),
        ),
    )  # fmt: skip


def num_labels(settings: Settings) -> int:
    """Returns how many classes there are: 2 where a config does not say, as transformers does."""
    named = settings.take("id2label", dict, {})
    return settings.size("num_labels", len(named) or 2)
