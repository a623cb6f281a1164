"""The choice of an operation's implementation on a device, and the reason for it."""
