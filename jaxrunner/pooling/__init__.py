"""What is asked of models that tell arrays in place of tokens, and what they answer."""
