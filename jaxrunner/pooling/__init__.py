"""The requests to models that return arrays in place of tokens, and their outputs."""
