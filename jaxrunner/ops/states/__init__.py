"""Recurrent states: short convolutions, state space models and delta rules, over rows of a step."""
