"""What a model tells of a request besides its tokens, one kind a file."""
