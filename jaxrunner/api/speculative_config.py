"""How tokens are drafted and verified, in vLLM's names. Knows no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxrunner.api import lookups
from jaxrunner.api.arguments import check_same
from jaxrunner.api.drafters import OwnDrafter, OwnSpeculator
from jaxrunner.api.speculative_keys import ELSEWHERE
from jaxrunner.api.validation import Bound, elements, shown, validate

METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp")
OF_A_MODEL = ("draft_model", "eagle", "eagle3")  # whose weights are a checkpoint of their own
REJECTIONS = ("exact", "standard", "block", "synthetic")
AUTO = "auto"
MAX_DRAFTS = 16
AUTO_DRAFTS = 3  # K with "auto", unless max_num_speculative_tokens is given


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Checked and completed when made: a field that has no effect is None.

    "exact" verification takes a draft where the target samples the same token, so that outputs
    are those without drafts, token for token. "standard" (arXiv:2211.17192) and "block"
    (arXiv:2403.10444) keep their distribution. "synthetic" accepts at given rates, whatever the
    drafts, to measure speed.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: a field is missing, out of range or without effect, or two contradict each other.
    """

    # One of `METHODS`, or a speculator or drafter of the user's.
    method: str | OwnSpeculator | OwnDrafter
    # K, 1 to 16; a speculator has its own. "auto": K, fewer or none, as gives most tokens a second.
    num_speculative_tokens: int | str | None = None
    max_num_speculative_tokens: int | None = None  # K with "auto"
    model: str | Path | None = None  # the checkpoint that drafts
    # "greedy" drafts the likeliest token, "probabilistic" samples one with independent noise. None,
    # for drafts with logits: with exact verification "coupled", which samples with the noise of the
    # target's own draw; with "standard" and "block" "probabilistic".
    draft_sample_method: str | None = None
    rejection_sample_method: str = "exact"
    prompt_lookup_min: int | None = None  # tokens of the shortest n-gram that is looked up
    prompt_lookup_max: int | None = None  # and of the longest
    suffix_decoding_max_tree_depth: int | None = None  # tokens of a match and its drafts together
    suffix_decoding_max_cached_tokens: int | None = None  # of ended requests that are searched
    suffix_decoding_max_spec_factor: float | None = None  # drafts for each token of a match
    # The least share of matches that must continue with a draft's token.
    suffix_decoding_min_token_prob: float | None = None
    # Of K positions, the share of steps in which this draft and all before it are accepted.
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None  # tokens a step gives on average, 1 to K + 1

    def __post_init__(self) -> None:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        given["method"] = _method(self.method)
        for name, bound in _BOUNDS.items():
            given[name] = validate(f"speculative_config.{name}", given[name], bound)
        given["num_speculative_tokens"] = _num_drafts(self)
        given["synthetic_acceptance_rates"] = _rates(self.synthetic_acceptance_rates)
        for name, value in given.items():
            object.__setattr__(self, name, value)
        _check_method(self)
        _check_drafts(self)
        _check_synthetic(self)
        for name, value in _lookup(self).items():
            object.__setattr__(self, name, value)

    @classmethod
    def read(cls, given: Any) -> "SpeculativeConfig":
        """Returns the config from a user's dict; a `SpeculativeConfig` is returned as it is.

        Other keys of vLLM are accepted if they ask for built-in behaviour.

        Raises:
          TypeError: it is no dict; or as when one is made.
          ValueError: a key is unknown; or as when one is made.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"speculative_config must be a dict, got {shown(given)}")
        known = [field.name for field in fields(cls)]
        taken: dict[str, Any] = {"method": None}  # which is refused as one that is not known
        for key, value in given.items():
            if isinstance(key, str) and key in ELSEWHERE:
                check_same("speculative_config", key, value, ELSEWHERE[key])
            elif key in known:
                taken[key] = value
            else:
                raise ValueError(
                    f"speculative_config has no key {shown(key)}: it may have {', '.join(known)}"
                )
        return cls(**taken)

    @property
    def is_adaptive(self) -> bool:
        """Whether steps may draft nothing."""
        return self.num_speculative_tokens == AUTO

    @property
    def num_drafts(self) -> int:
        """Tokens of each request that a step drafts, K; at most, if it is adaptive."""
        most, K = self.max_num_speculative_tokens, self.num_speculative_tokens
        if isinstance(self.method, OwnSpeculator):
            return self.method.num_drafts
        return K if isinstance(K, int) else most or AUTO_DRAFTS

    @property
    def drafts(self) -> str:
        """How drafts are drawn: "greedy", "probabilistic" or "coupled"."""
        if self.draft_sample_method is not None:
            return self.draft_sample_method
        if not (_has_weights(self.method) or self.method == "mtp"):
            return "greedy"  # there are no logits
        # Only if drafts are accepted by equality may they share the noise of what they are compared
        # with: block verification looks at the noise of positions that are drawn again.
        of_logits = dict(exact="coupled", standard="probabilistic", block="probabilistic")
        return of_logits.get(self.rejection_sample_method, "greedy")


_NGRAM = Bound(int, 1, lookups.MAX_NGRAM, optional=True)
_BOUNDS: dict[str, Bound] = {
    "max_num_speculative_tokens": Bound(int, 1, MAX_DRAFTS, optional=True),
    "model": Bound(str, optional=True, also=(Path,)),
    "draft_sample_method": Bound(str, optional=True, among=("greedy", "probabilistic")),
    "rejection_sample_method": Bound(str, among=REJECTIONS),
    "prompt_lookup_min": _NGRAM,
    "prompt_lookup_max": _NGRAM,
    "suffix_decoding_max_tree_depth": Bound(int, 2, lookups.MAX_DEPTH, optional=True),
    "suffix_decoding_max_cached_tokens": Bound(int, 0, lookups.MAX_CORPUS, optional=True),
    "suffix_decoding_max_spec_factor": Bound(float, 0, MAX_DRAFTS, optional=True),
    "suffix_decoding_min_token_prob": Bound(float, 0, 1, optional=True),
    "synthetic_acceptance_length": Bound(float, 1, MAX_DRAFTS + 1, optional=True),
}


def _method(value: Any) -> str | OwnSpeculator | OwnDrafter:
    if isinstance(value, str) and value in METHODS:
        return value
    if not isinstance(value, str | type) and isinstance(value, OwnSpeculator | OwnDrafter):
        return value
    raise ValueError(
        f"speculative_config.method must be one of {', '.join(METHODS)}, a Speculator or a "
        f"Drafter, got {shown(value)}"
    )


def _has_weights(method: str | OwnSpeculator | OwnDrafter) -> bool:
    """Whether it drafts with a checkpoint of its own."""
    return method in OF_A_MODEL if isinstance(method, str) else isinstance(method, OwnDrafter)


def _num_drafts(config: SpeculativeConfig) -> int | str:
    """Returns K, which a speculator says itself."""
    value, name = config.num_speculative_tokens, "speculative_config.num_speculative_tokens"
    bound = Bound(int, 1, MAX_DRAFTS)
    if isinstance(value, str) and value == AUTO:
        return AUTO
    if not isinstance(config.method, OwnSpeculator):
        if value is None:
            raise ValueError(f"{name} is missing: take {bound.wanted}, or {AUTO!r}")
        return validate(name, value, bound)
    own = validate("num_drafts of speculative_config.method", config.method.num_drafts, bound)
    if value is not None and value != own:
        raise ValueError(
            f"{name}={shown(value)} but {config.method.name} drafts {own}: leave it out"
        )
    return own


def _rates(values: Any) -> tuple[float, ...] | None:
    """Returns rates as a tuple, repeats and all."""
    name, one = "speculative_config.synthetic_acceptance_rates", Bound(float, 0, 1)
    if values is None:
        return None
    given = enumerate(elements(name, values, one.wanted))
    rates = tuple(validate(f"{name}[{i}]", value, one) for i, value in given)
    if list(rates) != sorted(rates, reverse=True):
        raise ValueError(
            f"{name}={rates} rise, but a draft is accepted only where those before it are: "
            "give rates that fall"
        )
    return rates


def _check_method(config: SpeculativeConfig) -> None:
    """Refuses what the method does not read, and asks for what it needs."""
    named = isinstance(config.method, str)
    method = config.method if isinstance(config.method, str) else config.method.name
    has_weights = _has_weights(config.method)
    if has_weights and config.model is None:
        raise ValueError(
            f"speculative_config.model is missing, {method!r} drafts with a checkpoint: name its "
            "folder"
        )
    most = config.max_num_speculative_tokens
    has_own = isinstance(config.method, OwnSpeculator)
    if most is not None and (has_own or not config.is_adaptive):
        raise ValueError(
            f"speculative_config.max_num_speculative_tokens={most} has no effect on "
            f"num_speculative_tokens={config.num_speculative_tokens!r} of method {method!r}: "
            f"leave it out, or set {AUTO!r} of a method by name"
        )
    reads = {
        "model": has_weights,
        "prompt_lookup_min": named and method == "ngram",
        "prompt_lookup_max": named and method == "ngram",
        **{name: named and method == "suffix" for name in lookups.SUFFIX},
        "draft_sample_method": has_weights
        or (named and (method == "mtp" or config.draft_sample_method == "greedy")),
    }
    for name, is_read in reads.items():
        if (value := getattr(config, name)) is not None and not is_read:
            raise ValueError(
                f"speculative_config.{name}={shown(value)} has no effect on method {method!r}: "
                "leave it out"
            )


def _check_drafts(config: SpeculativeConfig) -> None:
    """Refuses noise of the drafts' own where nothing weighs how likely a draft was."""
    rejection = config.rejection_sample_method
    if config.draft_sample_method == "probabilistic" and rejection not in ("standard", "block"):
        raise ValueError(
            "speculative_config.draft_sample_method='probabilistic' needs rejection_sample_method="
            f"'standard' or 'block', which weigh how likely a draft was, got {rejection!r}: set "
            "one of these, or leave draft_sample_method out"
        )


def _check_synthetic(config: SpeculativeConfig) -> None:
    """Checks that rates come with synthetic verification, once, and one for each draft."""
    K, rates = config.num_drafts, config.synthetic_acceptance_rates
    rejection, length = config.rejection_sample_method, config.synthetic_acceptance_length
    names = [
        f"synthetic_acceptance_{name}"
        for name, value in (("rates", rates), ("length", length))
        if value is not None
    ]
    if rejection != "synthetic":
        for name in names:
            raise ValueError(
                f"speculative_config.{name} has no effect on rejection_sample_method="
                f"{rejection!r}: leave it out, or set 'synthetic'"
            )
        return
    if len(names) != 1:
        raise ValueError(
            "speculative_config.rejection_sample_method='synthetic' needs either "
            "synthetic_acceptance_rates or synthetic_acceptance_length, "
            f"got {' and '.join(names) or 'none'}: give one"
        )
    if rates is not None and len(rates) != K:
        raise ValueError(
            f"speculative_config.synthetic_acceptance_rates has {len(rates)} rates, of at most "
            f"{K} drafts: give one for each draft"
        )
    if length is not None and length > K + 1:
        raise ValueError(
            f"speculative_config.synthetic_acceptance_length={length} exceeds the {K + 1} tokens "
            f"that {K} drafts give at most: lower it"
        )


def _lookup(config: SpeculativeConfig) -> dict[str, Any]:
    """Returns the numbers of a method that looks drafts up, completed."""
    if config.method == "ngram":
        return lookups.ngram_sizes(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        given = {name: getattr(config, name) for name in lookups.SUFFIX}
        return lookups.suffix_sizes(given, config.num_drafts)
    return {}
