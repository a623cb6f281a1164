"""Requests over time: queued, stepped, finished, saved and restored."""
