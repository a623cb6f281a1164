"""From a checkpoint's files to a model that pools."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jaxrunner.api.validation import shown
from jaxrunner.caches.encoder_only import EncoderOnly
from jaxrunner.config import ModelConfig
from jaxrunner.heads import classify, token_wise
from jaxrunner.heads.dense import DenseConfig
from jaxrunner.heads.pooled import PooledConfig, pooled
from jaxrunner.hf_config import Settings
from jaxrunner.model import Model
from jaxrunner.models.registry import FAMILIES
from jaxrunner.parallel.mesh import mesh_of
from jaxrunner.parallel.stages import stages_of
from jaxrunner.pooling import sentence_transformers, steps
from jaxrunner.pooling.params import OF_TOKENS, PoolerConfig
from jaxrunner.text.tokenizer import Tokenizer

RUNNERS = ("auto", "generate", "pooling")
# Tasks of models, by the ends of their architectures' names.
TASKS = dict(
    ForSequenceClassification="classify",
    ForTokenClassification="token_classify",
    ForRewardModel="token_classify",
    ForProcessRewardModel="token_classify",
    Model="embed",
    ForMaskedLM="embed",
    ForCausalLM="embed",
)
TOKENS = "classifier_from_token"
OLD_ACTIVATION = "sbert_ce_default_activation_function"  # `activation_fn` of older cross-encoders
OWN_KEYS = (
    "sentence_transformers", "is_matryoshka", "matryoshka_dimensions", TOKENS,
    "is_original_qwen3_reranker", OLD_ACTIVATION,
)  # fmt: skip
# Architectures of encoders with a product behind each token, and what these are by `model_type`.
COLBERT = "HF_ColBERT", "ColBERTModernBertModel"
COLBERT_BASES = dict(bert="BertModel", modernbert="ModernBertModel", roberta="RobertaModel")
COLBERT_BASES["xlm-roberta"] = "XLMRobertaModel"
COLBERT_PRODUCT, COLBERT_SIZE = "linear", 128  # the latter where there are no weights to look at
Shapes = Callable[[Path], Mapping[str, tuple[int, ...]]]


def no_shapes(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of a folder without weights."""
    return {}


@dataclass(frozen=True)
class PoolingFiles:
    """The description of a model that pools, as its checkpoint has it."""

    settings: dict[str, Any]  # of the model below, without an output layer
    architecture: str
    base: str  # the architecture of the model below
    task: str
    values: dict[str, Any]  # of config.json
    folder: Path
    asked: PoolerConfig
    shapes: Shapes = no_shapes  # of the tensors in a folder

    def made(self, model: Model, config: ModelConfig) -> tuple[Model, ModelConfig]:
        """Returns the family and the config that pool, given those of the model below.

        Raises:
          ValueError: a setting that is not supported, or several devices.
        """
        mesh = mesh_of(config)
        if (mesh is not None and mesh.size > 1) or stages_of(config):
            raise ValueError(
                "runner='pooling' runs a model on one device: leave tensor_parallel_size and "
                "pipeline_parallel_size out, data_parallel_size may be set"
            )
        modules, asked = sentence_transformers.read(self.folder), self.asked
        encodes = any(isinstance(kind, EncoderOnly) for kind in config.cache_kinds)
        pooling, layers = self._head(config, modules, encodes=encodes)
        task = asked.task or ("token_classify" if self.steps else self.task)
        if asked.pooling_type is not None:
            pooling = asked.pooling_type
        if task.startswith("token") or pooling in OF_TOKENS:
            task, pooling = f"token_{task.removeprefix('token_')}", "ALL"
        if task.endswith("classify") and not layers:
            raise ValueError(
                f"task={task!r} wants a model with layers that score, {self.architecture} has "
                "none: take embed or token_embed"
            )
        activation, default = self._activation(task, layers, modules)
        use = default if asked.activates is None else asked.activates
        columns = tuple(map(int, asked.returned_token_ids or ()))
        made = PooledConfig(
            model,
            config,
            task,
            pooling,
            layers,
            activation,
            use,
            asked.dimensions,
            encodes,
            tuple(Settings(self.values).each("matryoshka_dimensions", int, [])),
            self.steps,
            asked.step_tag_id,
            () if self.writes_steps else columns,  # else they are rows of the layer
        )
        made.check_dimensions(asked.dimensions)
        num_out = config.vocab_size if self.writes_steps else made.num_out
        steps.check(asked, steps=self.steps, num_out=num_out, vocab_size=config.vocab_size)
        return pooled(model, made), cast(ModelConfig, made)

    @property
    def steps(self) -> bool:
        """Whether scores are those of steps of reasoning."""
        default = "STEP" if self.architecture.endswith("ForProcessRewardModel") else None
        return (self.asked.pooling_type or default) == "STEP"

    @property
    def writes_steps(self) -> bool:
        """Whether these are logits of a model that writes tokens."""
        return self.steps and self.architecture.endswith("ForCausalLM")

    def _head(
        self, config: ModelConfig, modules: sentence_transformers.Modules, *, encodes: bool
    ) -> tuple[str, tuple[DenseConfig, ...]]:
        """Returns the pooling that the files say, and the layers behind it."""
        settings, E = Settings(self.values, str(self.folder / "config.json")), config.hidden_size
        if self.writes_steps:
            return "ALL", classify.logits_of(settings, self._step_tokens(config.vocab_size), E)
        if self.task == "classify" and self.values.get(TOKENS):
            return "LAST", classify.from_tokens(settings, self._tokens(config.vocab_size), E)
        if self.architecture in COLBERT:
            return "ALL", modules.layers or (self._colbert(E),)
        if self.task == "classify":
            return classify.classifier(self.base, settings, E)
        if self.architecture.endswith("ForTokenClassification"):
            return "ALL", token_wise.token_classes(self.base, settings, E)
        if self.task == "token_classify":
            return "ALL", token_wise.rewards(self.architecture, settings, E)
        return modules.pooling or ("CLS" if encodes else "LAST"), modules.layers

    def _colbert(self, width: int) -> DenseConfig:
        """Returns the product behind each token, as wide as the checkpoint has it."""
        shape = self.shapes(self.folder).get(f"{COLBERT_PRODUCT}.weight", (COLBERT_SIZE, width))
        # A tensor that is no matrix is refused by name when it is read.
        outputs = shape[0] if len(shape) == 2 and shape[0] else COLBERT_SIZE
        return DenseConfig(COLBERT_PRODUCT, width, outputs, bias=False)

    def _step_tokens(self, vocab_size: int) -> tuple[int, ...]:
        """Returns the ids of the tokens whose logits score steps."""
        ids = tuple(map(int, self.asked.returned_token_ids or ()))
        if not ids or max(ids) >= vocab_size:
            raise ValueError(
                f"pooling_type='STEP' of {self.architecture} wants returned_token_ids, tokens of "
                f"the {vocab_size} whose logits are scores, got {shown(ids)}: name them in "
                "pooler_config"
            )
        return ids

    def _tokens(self, vocab_size: int) -> tuple[int, ...]:
        """Returns the ids of the tokens whose logits are scores."""
        named: Any = self.values[TOKENS]
        ids: Any = named
        if isinstance(named, list) and all(isinstance(token, str) for token in named):
            tokenizer = Tokenizer.from_folder(self.folder)
            ids = [tokenizer.inner.token_to_id(token) for token in named]
        whole = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab_size for i in ids)
        if not whole or len(ids) < 2:
            raise ValueError(
                f"{TOKENS} must list two tokens of the vocabulary or more, got {shown(named)}: "
                "name them as tokenizer.json does, or by their ids"
            )
        return tuple(ids)

    def _activation(
        self, task: str, layers: tuple[DenseConfig, ...], modules: sentence_transformers.Modules
    ) -> tuple[str, bool]:
        """Returns what runs on what is pooled, and whether it does where nobody says."""
        if task.endswith("embed"):
            # The lists of modules of ColBERTs have no norm, which belongs to MaxSim.
            return "normalize", modules.normalize is not False or self.architecture in COLBERT
        kinds = dict(regression="identity", multi_label_classification="sigmoid")
        kind = kinds.get(self.values.get("problem_type") or "")
        own = self.values.get("sentence_transformers") or {}
        named = own.get("activation_fn") if isinstance(own, dict) else None
        named = named or self.values.get(OLD_ACTIVATION)
        if str(named).endswith(("Identity", "Sigmoid")):
            kind = str(named).rpartition(".")[2].lower()
        return kind or ("sigmoid" if layers[-1].outputs == 1 else "softmax"), True


def read_pooling(
    runner: str,
    values: Mapping[str, Any],
    folder: Path,
    asked: PoolerConfig,
    shapes: Shapes = no_shapes,
) -> PoolingFiles | None:
    """Returns what a checkpoint says of pooling; None where it is to generate tokens.

    runner: "auto" pools where the architecture is one that does. shapes: of the folder's tensors.

    Raises:
      ValueError: there is no such runner, or the architecture has no such use; names it.
    """
    if runner not in RUNNERS:
        raise ValueError(f"runner must be one of {RUNNERS}, got {shown(runner)}")
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    name = name if isinstance(name, str) else None  # `read_model` refuses others by name
    found = None if name is None else _base(name)
    generates = name in FAMILIES and FAMILIES[name].samples
    if found is None or runner == "generate" or (runner == "auto" and generates):
        if asked != PoolerConfig():
            raise ValueError(
                f"pooler_config is for models that pool, and {shown(name)} generates: pass "
                "runner='pooling', or leave it out"
            )
        if runner == "pooling" or (found is not None and not generates):
            raise ValueError(
                f"runner={runner!r} has no use for architectures={shown(names)}: models that "
                "pool are those of docs/pooling_models.md, others generate"
            )
        return None
    base, task = found
    if name in COLBERT:
        base = COLBERT_BASES.get(str(values.get("model_type")), base)
    settings = {key: value for key, value in values.items() if key not in OWN_KEYS}
    settings |= dict(architectures=[base], tie_word_embeddings=True)  # it has no output layer
    return PoolingFiles(settings, str(name), base, task, dict(values), folder, asked, shapes)


def _base(name: str) -> tuple[str, str] | None:
    """Returns the architecture below one that pools, and its task; None where there is none."""
    if name in COLBERT:
        return ("BertModel" if name == COLBERT[0] else "ModernBertModel"), "token_embed"
    for suffix, task in TASKS.items():
        if name.endswith(suffix):
            stem = name.removesuffix(suffix)
            known = [name, f"{stem}Model", f"{stem}ForCausalLM"]
            return next(((base, task) for base in known if base in FAMILIES), None)
    return None
