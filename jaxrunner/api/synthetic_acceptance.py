"""How often drafts are accepted where that is given, to measure speed. Knows no JAX."""

from jaxrunner.api.speculative_config import SpeculativeConfig


def conditional_rates(config: SpeculativeConfig) -> tuple[float, ...]:
    """Returns how often each of K drafts is accepted where all those before it were.

    A length gives as many certain drafts as fit and one for the fraction, which of all rates with
    this mean is the one that varies least.

    Raises:
      ValueError: `config` does not verify synthetically.
    """
    rates, length = config.synthetic_acceptance_rates, config.synthetic_acceptance_length
    if rates is None and length is not None:
        rates = tuple(min(max(length - 1 - i, 0.0), 1.0) for i in range(config.num_drafts))
    if rates is None:
        raise ValueError(
            f"speculative_config.rejection_sample_method={config.rejection_sample_method!r} has no "
            "acceptance rates: set 'synthetic'"
        )
    before = (1.0, *rates[:-1])
    return tuple(p / q if q > 0 else 0.0 for p, q in zip(rates, before, strict=True))
