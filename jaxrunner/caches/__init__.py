"""What layers keep of the tokens before one, one kind a file."""
