"""From a model's name to its config, weights and tokenizer, and from weights to files."""
