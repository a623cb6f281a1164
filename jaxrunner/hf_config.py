"""Reads a checkpoint's `config.json`: every key is used, known to be harmless, or refused."""

from collections.abc import Mapping
import json
import math
from pathlib import Path
from typing import Any

from jaxrunner.api.limits import ANY_SIZE, JSON_BYTES, SIZES, check_bytes
from jaxrunner.api.validation import shown

# Keys that change nothing of the forward pass at inference.
# Names of a checkpoint, its makers and the programs that wrote it.
_ORIGIN = """_commit_hash _from_model_config _model_name_or_path _name_or_path architectures author
    auto_map base_model base_model_name_or_path custom_pipelines datasets description
    is_llama_config language library_name license model_name model_type model_version name
    name_or_path original_model pipeline_tag tags transformers.js_config transformers_version
    transformers_weights unsloth_fixed unsloth_optimized unsloth_version version"""
# Of training: dropout, first values, losses, memory.
_TRAINING = """attention_dropout attention_dropout_prob attention_probs_dropout_prob attn_dropout
    attn_pdrop classifier_dropout dropout embd_pdrop embedding_dropout ffn_dropout
    gradient_checkpointing hidden_dropout hidden_dropout_prob init_device init_method init_std
    initializer_cutoff_factor initializer_factor initializer_range loss_function loss_type
    mlp_dropout neftune_noise_alpha no_recompute_layers pp_recompute_interval
    recompute_granularity resid_dropout resid_pdrop residual_dropout router_aux_loss_coef
    router_jitter_noise scale_loss sequence_parallel tensor_parallel_output use_recompute
    use_reentrant virtual_pp_degree"""
# How a program computes or stores the same.
_RUNNING = """_attn_implementation _attn_implementation_autoset _attn_implementation_internal
    _experts_implementation _flash_attn_2_enabled _pre_quantization_dtype attn_impl
    attn_implementation base_model_ep_plan base_model_pp_plan base_model_tp_plan bf16
    cache_implementation chunk_size_feed_forward dtype fp16 fp32 keys_to_ignore_at_inference
    logits_to_keep max_cache_len num_logits_to_keep onnx_export output_attentions
    output_hidden_states output_past output_router_logits output_scores return_dict
    return_dict_in_generate
    tf_legacy_loss torch_dtype torchscript use_bfloat16 use_cache use_flash_attention
    use_flash_attention_2 use_flash_attn use_fused_rms_norm use_fused_rope use_kernels
    use_liger_kernel use_memory_efficient_attention use_sdpa"""
# Of tokenizers and chats, which have files of their own.
_TEXT = """add_bos_token add_eos_token assistant_token_id bos_token bos_token_id chat_template
    clean_up_tokenization_spaces decoder_start_token_id eos_token eos_token_id
    max_sequence_length max_seq_len max_seq_length model_max_length pad_token pad_token_id
    padding_side prefix sep_token_id seq_length system_token_id tokenizer_class truncation_side
    unk_token unk_token_id user_token_id"""
# Of sampling, which generation_config.json speaks for.
_SAMPLING = """diversity_penalty do_sample early_stopping length_penalty max_length max_new_tokens
    min_length num_beam_groups num_beams num_return_sequences temperature top_k top_p typical_p"""
# Of other heads and other kinds of models.
_OTHERS = """finetuning_task id2label is_decoder is_encoder_decoder label2id layer_norm_eps
    num_labels problem_type summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj task_specific_params tie_encoder_decoder"""
HARMLESS = frozenset(" ".join((_ORIGIN, _TRAINING, _RUNNING, _TEXT, _SAMPLING, _OTHERS)).split())
MOST_NAMED = 30  # settings in one message
MISSING = object()


class Settings:
    """The keys of one `config.json`, each to be taken once.

    Raises:
      ValueError: from every method, naming the key, what was wanted and what came.
    """

    def __init__(self, values: Mapping[str, Any], source: str = "config.json", key: str = ""):
        """key: of the group that `values` are, "" for a whole file."""
        self._values, self._key, self._taken = dict(values), key, set()
        self.source = f"{source}: {key}" if key else source

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = MISSING) -> Any:
        """Returns the value of `key`; `default` where it is absent or null.

        Raises:
          ValueError: the key is missing without a default, or its value is not of that kind.
        """
        self._taken.add(key)
        value = self._values.get(key)
        if value is None:
            if default is MISSING:
                raise ValueError(f"{self.source} has no {key!r}: it is needed to build the model")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        kinds = (kind,) if isinstance(kind, type) else kind
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds):
            names = kind.__name__ if isinstance(kind, type) else [k.__name__ for k in kind]
            raise ValueError(f"{self.source}: {key!r} must be {names}, got {shown(value)}")
        if isinstance(value, float) and not math.isfinite(value):  # JSON as Python reads it has NaN
            raise ValueError(f"{self.source}: {key!r} must be finite, got {value}")
        return value

    def size(self, key: str, default: Any = MISSING, *, least: int = 1) -> int:
        """Returns the value of `key`, an integer from `least` to what `limits.SIZES` says.

        Raises:
          ValueError: as `take`, or the value is out of range.
        """
        value, most = self.take(key, int, default), SIZES.get(key, ANY_SIZE)
        if value < least:
            raise ValueError(f"{self.source}: {key!r} must be at least {least}, got {value}")
        if value > most:
            raise ValueError(f"{self.source}: {key!r} must be at most {most}, got {shown(value)}")
        return value

    def each(self, key: str, kind: type, default: list[Any]) -> list[Any]:
        """Returns the value of `key`, a list of one type of values.

        Raises:
          ValueError: as `take`, or a value of the list has another type.
        """
        values = self.take(key, list, default)
        for i, value in enumerate(values):
            if type(value) is not kind:
                raise ValueError(
                    f"{self.source}: {key}[{i}] must be {kind.__name__}, got {shown(value)}"
                )
        return values

    def expect(self, key: str, *wanted: Any) -> None:
        """Refuses a setting that changes the maths and is not supported.

        Raises:
          ValueError: the value is none of `wanted`.
        """
        self._taken.add(key)
        value = self._values.get(key)
        if value is not None and value not in wanted:
            raise ValueError(
                f"{self.source}: {key}={shown(value)} is not supported, only {wanted[0]!r}: "
                "running without it would change the model's outputs"
            )

    def ignore(self, *keys: str) -> None:
        """Takes keys that change nothing of the maths, whatever their values."""
        self._taken |= {*keys}

    def section(self, key: str) -> "Settings | None":
        """Returns a nested group of keys, None where it is absent."""
        value = self.take(key, dict, {})
        return Settings(value, self.source, key) if value else None

    def with_value(self, key: str, value: Any) -> "Settings":
        """Returns the same with another value of one key."""
        return self._with(self._values | {key: value})

    def with_defaults(self, **values: Any) -> "Settings":
        """Returns the same with values of keys that are absent."""
        return self._with(values | self._values)

    def renamed(self, **names: str) -> "Settings":
        """Returns the same with keys under the names that most families have for them.

        names: new name of each key; what has the new name already is dropped where both are there.
        """
        here = {old: new for old, new in names.items() if old in self._values}
        values = {k: v for k, v in self._values.items() if k not in {*here, *here.values()}}
        return self._with(values | {new: self._values[old] for old, new in here.items()})

    def without(self, *keys: str) -> "Settings":
        """Returns these settings but for some, which have been read."""
        return self._with({k: v for k, v in self._values.items() if k not in keys})

    def _with(self, values: dict[str, Any]) -> "Settings":
        other = Settings(values, self.source.removesuffix(f": {self._key}"), self._key)
        other._taken |= self._taken
        return other

    def finish(self) -> None:
        """Refuses keys that nobody took; null, false and empty ones say nothing.

        Raises:
          ValueError: there are such keys; names them.
        """
        left = self._values.keys() - self._taken - HARMLESS
        unknown = sorted(k for k in left if self._values[k] not in (None, False, [], {}))
        if unknown:
            named = unknown[:MOST_NAMED]
            pairs = ", ".join(f"{k:.60}={shown(self._values[k])}" for k in named)
            without: dict[str, Any] = dict.fromkeys(named)
            if self._key:
                kept = {k: v for k, v in self._values.items() if k not in unknown}
                without = {self._key: kept}
            raise ValueError(
                f"{self.source}: {len(unknown)} unknown setting{'s' * (len(unknown) > 1)}: "
                f"{pairs}. Where that changes no outputs, pass hf_overrides={without!s:.1500}"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      FileNotFoundError, ValueError: the file is missing, too large, broken, or no object; names it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: a checkpoint folder must hold {path.name}")
    check_bytes(path, JSON_BYTES)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON, got {error}: fetch it again") from error
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} must hold a JSON object, got {type(values).__name__}: fetch it again"
        )
    return values
