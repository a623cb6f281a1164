"""vLLM's GPU model runner as compiled JAX: see `step.py` first."""
