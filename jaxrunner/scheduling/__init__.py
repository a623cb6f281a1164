"""The number of tokens of each request in a step, and the KV blocks it holds. Knows no JAX."""
