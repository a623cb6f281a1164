"""What a user may add to jaxrunner, by its public interfaces alone: one idea a file."""
