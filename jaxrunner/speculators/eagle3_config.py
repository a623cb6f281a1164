"""The config of an EAGLE-3 head, read from the `config.json` of its checkpoint. arXiv:2503.01840.

Two layouts are in use. Heads of SpecForge, NVIDIA and the authors have flat settings, as a Llama;
those of the `speculators` library have a group `transformer_layer_config` for the layer.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from jaxrunner.api.validation import shown
from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.config import ModelConfig
from jaxrunner.hf_config import Settings
from jaxrunner.models.decoder_config import DecoderConfig, read_decoder
from jaxrunner.models.qwen2 import read_windows

ARCHITECTURES = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel",
)  # fmt: skip
LAYER = ("midlayer.", "layers.0.")  # prefixes of the layer's tensors
FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
# Settings of `speculators` about itself, its training and how many tokens to draft.
OF_SPECULATORS: dict[str, type] = dict(
    speculators_config=dict, speculators_version=str, embed_requires_grad=bool,
    has_no_defaults_at_init=bool,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """An EAGLE-3 head for one target: a decoder layer, and what stands around it."""

    decoder: DecoderConfig  # of its one layer; V is the target's
    aux_layers: tuple[int, ...]  # of the target, whose inputs "residual.{i}" it reads
    target_hidden_size: int
    draft_vocab_size: int  # tokens that its logits are of
    norm_before_fc: bool = False  # one norm of all that `fc` reads
    fc_norm: bool = False  # a norm of each that `fc` reads
    norm_before_residual: bool = False  # the layer adds to the normed feature
    norm_output: bool = False  # the normed output is fed back
    own_head: bool = False  # else the target's
    own_embed: bool = False  # else the target's
    reduced: bool = False  # `d2t` maps its vocabulary to the target's
    mapped_back: bool = False  # the checkpoint has `t2d`, too
    prefix: str = LAYER[0]

    @property
    def architecture(self) -> str:
        """Its name in messages."""
        return self.decoder.architecture

    @property
    def dtype(self) -> str:
        """The dtype that its checkpoint is stored in."""
        return self.decoder.dtype

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the target's states that it reads."""
        return tuple(f"residual.{i}" for i in self.aux_layers)

    @property
    def is_tied(self) -> bool:
        """Whether logits are of the embedding."""
        return self.decoder.tie_word_embeddings and not self.own_head

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kind of its layer."""
        return self.decoder.cache_kinds

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        num_aux, E = len(self.aux_layers), self.decoder.hidden_size
        sizes = {
            "2E": 2 * E, "aux": num_aux, "target_E": self.target_hidden_size,
            "all_aux": num_aux * self.target_hidden_size, "draft_V": self.draft_vocab_size,
            "own_V": self.decoder.vocab_size,
        }  # fmt: skip
        flags = (*FLAGS, "own_head", "own_embed", "reduced")
        return self.decoder.dims | sizes | {flag: getattr(self, flag) for flag in flags}


def read(settings: Settings, target: ModelConfig, tensors: Collection[str] = ()) -> Eagle3Config:
    """Reads the config of a head for `target`.

    tensors: names of those in the checkpoint: they show which optional weights it has. Without
    them it is as SpecForge saves it: its own logits where its vocabulary is smaller.

    Raises:
      ValueError: a setting that is not supported, or that does not fit the target; names it.
    """
    names = settings.each("architectures", str, [])
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ValueError(
            f"{settings.source}: architectures of an EAGLE-3 head must be one of "
            f"{sorted(ARCHITECTURES)}, got {shown(names)}"
        )
    settings.expect("speculators_model_type", "eagle3")
    sizes: dict[str, Any] = _read_around(settings)
    layer = settings.section("transformer_layer_config")
    if layer is not None:
        for key, kind in OF_SPECULATORS.items():
            settings.take(key, kind, None)
        settings.take("tie_word_embeddings", bool, False)  # the tensors tell
        settings.finish()
    layer = layer or settings
    prefix = next((p for p in LAYER if any(name.startswith(p) for name in tensors)), LAYER[0])
    decoder = _read_layer(layer, f"{prefix}self_attn.q_norm.weight" in tensors)
    vocab = decoder.vocab_size
    sizes["aux_layers"] = sizes["aux_layers"] or default_layers(target.num_hidden_layers)
    sizes["draft_vocab_size"] = sizes["draft_vocab_size"] or vocab
    sizes["target_hidden_size"] = sizes["target_hidden_size"] or target.hidden_size
    reduced = sizes["draft_vocab_size"] < vocab
    config = Eagle3Config(
        **sizes,
        decoder=decoder,
        own_head="lm_head.weight" in tensors if tensors else reduced,
        own_embed="embed_tokens.weight" in tensors,
        reduced="d2t" in tensors if tensors else reduced,
        mapped_back="d2t" in tensors and "t2d" in tensors,
        prefix=prefix,
    )
    for problem in _problems(config, target):
        raise ValueError(f"{settings.source}: {problem}")
    return config


def _read_around(settings: Settings) -> dict[str, Any]:
    """Reads what is no setting of the layer."""
    own = settings.section("eagle_config") or Settings({}, settings.source, "eagle_config")
    own.expect("use_aux_hidden_state", True)
    own.expect("use_input_layernorm_in_first_layer", True)
    own.expect("use_last_layernorm", True)
    own.expect("parallel_draft_step", 1)
    # The `speculators` library and vLLM count what layers read, SpecForge what layers give.
    given = own.each("eagle_aux_hidden_state_layer_ids", int, [])
    read_by = settings.each("eagle_aux_hidden_state_layer_ids", int, [])
    if given and read_by and [i + 1 for i in given] != read_by:
        raise ValueError(
            f"{settings.source}: eagle_aux_hidden_state_layer_ids={shown(read_by)} counts layers "
            f"that read a state, and in eagle_config, {shown(given)}, layers that give one: they "
            "must name the same states. Remove the wrong one"
        )
    flags = {flag: settings.take(flag, bool, own.take(flag, bool, False)) for flag in FLAGS}
    own.finish()
    aux = tuple(read_by or (i + 1 for i in given))
    settings.expect("num_aux_hidden_states", len(aux) or 3)
    settings.expect("logit_scale", 1.0, 1)
    width = settings.size("target_hidden_size", 0, least=0)
    draft_vocab = settings.size("draft_vocab_size", 0, least=0)
    return dict(aux_layers=aux, draft_vocab_size=draft_vocab, target_hidden_size=width) | flags


def _read_layer(settings: Settings, qk_norm: bool) -> DecoderConfig:
    bias, mlp_bias = (settings.take(f"{part}_bias", bool, False) for part in ("attention", "mlp"))
    windows = read_windows(settings) if settings.size("num_hidden_layers") == 1 else ()
    if not windows:
        raise ValueError(
            f"{settings.source}: num_hidden_layers of an EAGLE-3 head must be 1, got "
            f"{settings.size('num_hidden_layers')}: get a head of one layer"
        )
    flags = dict(qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, qk_norm=qk_norm)
    return read_decoder(settings, windows=windows, **flags)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Returns the layers of a target whose inputs a head reads that names none."""
    return 2, num_layers // 2, num_layers - 3


def _problems(config: Eagle3Config, target: ModelConfig) -> Iterator[str]:
    """Says why this is no head for this target, or what its checkpoint lacks."""
    decoder, num_layers = config.decoder, target.num_hidden_layers
    vocab, draft_vocab, E = decoder.vocab_size, config.draft_vocab_size, target.hidden_size
    if vocab != target.vocab_size:
        yield f"vocab_size={vocab} must be the target's, {target.vocab_size}: get its own head"
    if config.target_hidden_size != E:
        got = config.target_hidden_size
        yield f"target_hidden_size={got} must be the target's hidden_size, {E}: get its own head"
    if not all(0 <= i < num_layers for i in config.aux_layers):
        yield (
            f"eagle_aux_hidden_state_layer_ids name the inputs of layers {config.aux_layers} of "
            f"the target, which has layers 0 to {num_layers - 1}: get its own head"
        )
    shared = [n for n, own in (("embed_tokens", config.own_embed), ("lm_head", config.own_head))
              if not own]  # fmt: skip
    if shared and decoder.hidden_size != E:
        yield (
            f"hidden_size={decoder.hidden_size} must be the target's, {E}, where the head takes "
            f"the target's {' and '.join(shared)}: save them with it"
        )
    if draft_vocab > vocab or (draft_vocab < vocab and not (config.reduced and config.own_head)):
        yield (
            f"draft_vocab_size={draft_vocab} must be vocab_size={vocab}, or smaller in a "
            "checkpoint with the tensors d2t and lm_head.weight: save them with it"
        )
    if config.is_tied and not config.own_embed and target.dims.get("untied", True):
        yield (
            "tie_word_embeddings=True takes logits of the target's embedding, whose own logits "
            "are of another weight: save lm_head.weight or embed_tokens.weight with the head"
        )
