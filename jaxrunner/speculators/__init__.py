"""Speculators: they propose tokens for the model to verify, one kind a file."""
