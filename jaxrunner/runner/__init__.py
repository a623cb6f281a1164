"""From a scheduler's decision to a launch of a compiled program, and back."""
