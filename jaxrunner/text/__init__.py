"""Text to tokens and back, chats, and the grammars of structured outputs. Knows no JAX."""
