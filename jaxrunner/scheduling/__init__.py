"""Which requests compute how many tokens in a step, and the KV blocks they hold. Knows no JAX."""
