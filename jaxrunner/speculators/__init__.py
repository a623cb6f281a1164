"""What proposes tokens for the model to verify, one kind a file."""
