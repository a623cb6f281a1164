"""Attention over pages of keys and values, and what writes them."""
