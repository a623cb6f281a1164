"""Trains the embedded model on the Python standard library, and what drafts for it."""
