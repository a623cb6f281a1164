"""What `speculative_config` may say: each key is honoured, or refused by name."""

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxrunner.api.speculative_config import METHODS, SpeculativeConfig
from jaxrunner.api.synthetic_acceptance import conditional_rates
from jaxrunner.speculators.eagle import eagle
from jaxrunner.speculators.speculator import Speculator
from tests.outside.lookup import lookup

NGRAM: dict[str, Any] = dict(method="ngram", num_speculative_tokens=3)
SUFFIX: dict[str, Any] = dict(method="suffix", num_speculative_tokens=3)
EAGLE: dict[str, Any] = dict(method="eagle3", num_speculative_tokens=3, model="head")
SYNTHETIC: dict[str, Any] = NGRAM | dict(rejection_sample_method="synthetic")
read = SpeculativeConfig.read


class Fraction(NamedTuple):
    """A speculator that is none."""

    name: str = "fraction"
    num_drafts: float = 2.5
    propose: Any = print


def test_a_dict_becomes_a_config_that_may_be_a_key():
    config = read(NGRAM | dict(num_speculative_tokens=np.int32(3), prompt_lookup_max=4))
    assert config == SpeculativeConfig(**NGRAM, prompt_lookup_min=4, prompt_lookup_max=4)
    assert len({config, read(config)}) == 1 and type(config.num_speculative_tokens) is int
    with pytest.raises(FrozenInstanceError):
        config.__setattr__("method", "suffix")


@pytest.mark.parametrize("method", METHODS)
def test_each_method_is_taken(method: str):
    of_model = method in ("draft_model", "eagle", "eagle3")
    given = dict(method=method, num_speculative_tokens=2) | (dict(model="m") if of_model else {})
    config = read(given)
    assert (config.method, config.model) == (method, "m" if of_model else None)
    assert config.rejection_sample_method == "exact"


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, (5, 5)),
        (dict(prompt_lookup_min=2), (2, 2)),
        (dict(prompt_lookup_max=3), (3, 3)),
        (dict(prompt_lookup_min=1, prompt_lookup_max=4), (1, 4)),
    ],
    ids=["neither", "shortest", "longest", "both"],
)
def test_the_sizes_of_n_grams_are_completed_as_in_vllm(given: dict[str, int], sizes: tuple):
    config = read(NGRAM | given)
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == sizes
    assert read(EAGLE).prompt_lookup_min is None


def test_the_numbers_of_suffixes_are_completed_as_in_vllm():
    given = dict(suffix_decoding_max_cached_tokens=0, suffix_decoding_max_spec_factor=2)
    config = read(SUFFIX | given)
    assert config.suffix_decoding_max_tree_depth == 24
    assert config.suffix_decoding_max_cached_tokens == 0
    assert config.suffix_decoding_max_spec_factor == 2.0
    assert config.suffix_decoding_min_token_prob == 0.1
    assert read(EAGLE).suffix_decoding_max_tree_depth is None


def test_drafts_share_the_target_s_noise_where_only_equal_ones_stand():
    assert read(EAGLE).drafts == "coupled"
    assert read(NGRAM).drafts == "greedy"  # they have no logits
    for method in ("standard", "block"):
        assert read(EAGLE | dict(rejection_sample_method=method)).drafts == "probabilistic"
        assert read(NGRAM | dict(rejection_sample_method=method)).drafts == "greedy"
        for drafts in ("greedy", "probabilistic"):
            given = dict(draft_sample_method=drafts, rejection_sample_method=method)
            assert read(EAGLE | given).drafts == drafts
    assert read(EAGLE | dict(draft_sample_method="greedy")).drafts == "greedy"


@pytest.mark.parametrize("rejection", ["exact", "synthetic"])
def test_noise_of_the_drafts_own_needs_who_weighs_how_likely_a_draft_was(rejection: str):
    given = dict(draft_sample_method="probabilistic", rejection_sample_method=rejection)
    match = (
        "speculative_config.draft_sample_method='probabilistic' needs rejection_sample_method="
        f"'standard' or 'block', .* got '{rejection}': set one of these, or leave draft_sample_me"
    )
    with pytest.raises(ValueError, match=match):
        read(EAGLE | given)


def test_a_speculator_of_the_user_s_says_how_many_it_drafts():
    config = read(dict(method=lookup))
    assert config.method is lookup and config.num_speculative_tokens == lookup.num_drafts == 3
    assert config == read(dict(method=lookup, num_speculative_tokens=3))
    assert config.drafts == "greedy"


def test_auto_has_a_maximum():
    auto = NGRAM | dict(num_speculative_tokens="auto")
    assert (read(auto).num_drafts, read(auto).is_adaptive) == (3, True)
    assert read(auto | dict(max_num_speculative_tokens=5)).num_drafts == 5
    own = read(dict(method=lookup, num_speculative_tokens="auto"))
    assert (own.num_drafts, own.is_adaptive) == (lookup.num_drafts, True)
    given = read(SYNTHETIC | auto | dict(synthetic_acceptance_length=2.5))
    assert conditional_rates(given) == (1.0, 0.5, 0.0)


def test_keys_of_vllm_are_taken_where_they_change_nothing():
    more = dict(draft_tensor_parallel_size=1, quantization=None, parallel_drafting=False)
    assert read(EAGLE | more) == read(EAGLE | dict(model="head"))
    assert read(EAGLE | dict(model=Path("head"))).model == Path("head")


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        (dict(synthetic_acceptance_length=2.5), (1, 0.5, 0)),
        (dict(synthetic_acceptance_length=1), (0, 0, 0)),
        (dict(synthetic_acceptance_length=4), (1, 1, 1)),
        (dict(synthetic_acceptance_rates=[0.9, 0.45, 0.45]), (0.9, 0.5, 1)),
        (dict(synthetic_acceptance_rates=np.array([0.5, 0, 0])), (0.5, 0, 0)),
    ],
    ids=["a fraction", "nothing", "all", "repeats", "zeros"],
)
def test_rates_are_of_drafts_whose_forerunners_stand(given: dict[str, Any], rates: tuple):
    config = read(SYNTHETIC | given)
    assert conditional_rates(config) == pytest.approx(rates, abs=1e-12)
    assert hash(config) == hash(read(config))


def test_rates_of_a_length_have_its_mean():
    for length in np.linspace(1, 5, 23):
        config = read(
            SYNTHETIC | dict(num_speculative_tokens=4, synthetic_acceptance_length=length)
        )
        assert 1 + np.cumprod(conditional_rates(config)).sum() == pytest.approx(length)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (NGRAM | dict(num_tokens=3), r"has no key 'num_tokens': it may have method, num_specul"),
        (
            SUFFIX | dict(suffix_decoding_max_tree_depth=3),
            r"max_tree_depth=3 holds 3 drafts and no token that they follow: take more than 3",
        ),
        (SUFFIX | dict(suffix_decoding_min_token_prob=2), r"min_token_prob=2 is out of range"),
        (
            SUFFIX | dict(suffix_decoding_max_cached_requests=9),
            r"max_cached_requests=9.*set suffix_decoding_max_cached_tokens, 0 for none",
        ),
        (
            NGRAM | dict(suffix_decoding_max_tree_depth=9),
            r"max_tree_depth=9 has no effect on method 'ngram': leave it out",
        ),
        ({1: 2}, r"speculative_config has no key 1: it may have method"),
        (dict(num_speculative_tokens=3), r"method must be one of ngram, suffix, .* got None"),
        (
            dict(method="medusa"),
            r"must be one of .*mtp, a Speculator or a Drafter, got 'medusa'",
        ),
        (
            dict(method=Speculator),
            r"must be one of .*, a Speculator or a Drafter, got <class",
        ),
        (dict(method=lookup, num_speculative_tokens=2), r"=2 but lookup drafts 3: leave it out"),
        (
            dict(method=lookup, draft_sample_method="greedy"),
            r"draft_sample_method='greedy' has no effect on method 'lookup': leave it out",
        ),
        (dict(method="ngram"), r"num_speculative_tokens is missing: take an integer from 1 to 16"),
        (dict(method=eagle, model="m"), r"num_speculative_tokens is missing: take an integer from"),
        (EAGLE | dict(method=eagle, model=None), r"model is missing, 'eagle' drafts with a check"),
        (NGRAM | dict(num_speculative_tokens=17), r"num_speculative_tokens=17 is out of range"),
        (NGRAM | dict(num_speculative_tokens=0), r"num_speculative_tokens=0 is out of range"),
        (NGRAM | dict(model="m"), r"model='m' has no effect on method 'ngram': leave it out"),
        (
            dict(method="mtp", num_speculative_tokens=1, model="m"),
            r"model='m' has no effect on method 'mtp'",
        ),
        (
            dict(method="eagle", num_speculative_tokens=1),
            r"speculative_config.model is missing, 'eagle' drafts with a checkpoint: name its fol",
        ),
        (EAGLE | dict(prompt_lookup_min=1), r"prompt_lookup_min=1 has no effect on .* 'eagle3'"),
        (EAGLE | dict(prompt_lookup_max=1), r"prompt_lookup_max=1 has no effect on .* 'eagle3'"),
        (
            NGRAM | dict(draft_sample_method="probabilistic"),
            r"draft_sample_method='probabilistic' has no effect on method 'ngram'",
        ),
        (EAGLE | dict(draft_sample_method="coupled"), r"must be 'greedy', .* got 'coupled'"),
        (NGRAM | dict(rejection_sample_method="strict"), r"'exact', 'standard', .* got 'strict'"),
        (
            NGRAM | dict(prompt_lookup_min=3, prompt_lookup_max=2),
            r"speculative_config.prompt_lookup_min=3 exceeds prompt_lookup_max=2: lower it",
        ),
        (NGRAM | dict(prompt_lookup_max=33), r"prompt_lookup_max=33 is out of range"),
        (
            NGRAM | dict(synthetic_acceptance_length=2),
            r"synthetic_acceptance_length has no effect on rejection_sample_method='exact': leave",
        ),
        (
            NGRAM | dict(synthetic_acceptance_rates=[1, 1, 0]),
            r"synthetic_acceptance_rates has no effect on rejection_sample_method='exact'",
        ),
        (SYNTHETIC, r"='synthetic' needs either synthetic_acceptance_rates or .* got none: give"),
        (
            SYNTHETIC | dict(synthetic_acceptance_rates=[1, 1, 0], synthetic_acceptance_length=2.0),
            r"got synthetic_acceptance_rates and synthetic_acceptance_length: give one",
        ),
        (
            NGRAM | dict(max_num_speculative_tokens=4),
            r"speculative_config.max_num_speculative_tokens=4 has no effect on num_speculative_",
        ),
        (
            dict(method="ngram", num_speculative_tokens="auto", max_num_speculative_tokens=17),
            r"max_num_speculative_tokens=17 is out of range: take an integer from 1 to 16",
        ),
        (
            SYNTHETIC | dict(synthetic_acceptance_rates=[1, 0.5]),
            r"has 2 rates, of at most 3 drafts: give one for each draft",
        ),
        (
            SYNTHETIC | dict(synthetic_acceptance_rates=[0.5, 0.6, 0.1]),
            r"=\(0.5, 0.6, 0.1\) rise, but a draft is accepted only where those before it are",
        ),
        (
            SYNTHETIC | dict(synthetic_acceptance_rates=[1, float("nan"), 0]),
            r"synthetic_acceptance_rates\[1\]=nan is out of range",
        ),
        (SYNTHETIC | dict(synthetic_acceptance_length=0.9), r"length=0.9 is out of range"),
        (
            SYNTHETIC | dict(synthetic_acceptance_length=4.5),
            r"synthetic_acceptance_length=4.5 exceeds the 4 tokens that 3 drafts give at most",
        ),
        (
            EAGLE | dict(draft_tensor_parallel_size=2),
            r"speculative_config: draft_tensor_parallel_size=2 is not supported: the devices of",
        ),
    ],
)
def test_what_has_no_effect_or_meaning_is_refused_by_name(given: dict[Any, Any], message: str):
    with pytest.raises(ValueError, match=message):
        read(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngram", r"speculative_config must be a dict, got 'ngram'"),
        (NGRAM | dict(num_speculative_tokens=2.0), r"an integer from 1 to 16, got 2.0 of float"),
        (NGRAM | dict(num_speculative_tokens="3"), r"an integer from 1 to 16, got '3' of str"),
        (EAGLE | dict(model=3), r"model must be a string or a Path or None, got 3"),
        (SYNTHETIC | dict(synthetic_acceptance_rates="1"), r"must be a list, each element a fin"),
        (dict(method=Fraction()), r"num_drafts of speculative_config.method must be an integer"),
    ],
)
def test_what_has_the_wrong_type_is_refused(given: Any, message: str):
    with pytest.raises(TypeError, match=message):
        read(given)


def test_there_are_no_rates_without_synthetic_verification():
    with pytest.raises(ValueError, match="'exact' has no acceptance rates: set 'synthetic'"):
        conditional_rates(read(NGRAM))
