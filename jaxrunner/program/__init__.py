"""What an engine compiles: its programs' static arguments, their padded sizes, and its state."""
