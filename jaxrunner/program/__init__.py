"""What an engine compiles: its static half, padded sizes, state, what programs take and give."""
