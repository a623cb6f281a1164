"""Encoders: every token sees all of its text, in one step. Layers are those of `blocks`."""
