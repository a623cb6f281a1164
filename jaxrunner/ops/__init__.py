"""Which implementation of an operation runs on a device, and why."""
