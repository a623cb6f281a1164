"""Heads: arrays that a model returns besides tokens, one kind a file."""
