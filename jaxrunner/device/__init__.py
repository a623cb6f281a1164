"""What is compiled: the entry points, how they are lowered, what one upload holds."""
