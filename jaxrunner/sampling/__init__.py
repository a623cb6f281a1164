"""Sampling rules. To add one, write one file like `min_p.py` and name it in `RULES`."""

from jaxrunner.sampling.min_p import min_p
from jaxrunner.sampling.min_tokens import min_tokens
from jaxrunner.sampling.rule import Rule
from jaxrunner.sampling.seed import seed
from jaxrunner.sampling.temperature import temperature
from jaxrunner.sampling.top_k_top_p import top_k_top_p

RULES: tuple[Rule, ...] = (seed, min_tokens, temperature, min_p, top_k_top_p)  # in vLLM's order
