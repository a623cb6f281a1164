"""Sampling rules. To add one, write one file like `min_p.py` and name it in `RULES`."""

from jaxrunner.rule import Rule
from jaxrunner.sampling.allowed_ids import allowed_ids
from jaxrunner.sampling.bad_words import bad_words
from jaxrunner.sampling.grammar import grammar
from jaxrunner.sampling.logit_bias import logit_bias
from jaxrunner.sampling.logprobs import logprob_ids
from jaxrunner.sampling.min_p import min_p
from jaxrunner.sampling.min_tokens import min_tokens
from jaxrunner.sampling.penalties import penalties
from jaxrunner.sampling.seed import seed
from jaxrunner.sampling.temperature import temperature
from jaxrunner.sampling.top_k_top_p import top_k_top_p

# In vLLM's order. The first two have parameters only, and change no logits.
RULES: tuple[Rule, ...] = (
    seed, logprob_ids, grammar, allowed_ids, logit_bias, min_tokens, penalties, bad_words,
    temperature, min_p, top_k_top_p,
)  # fmt: skip
