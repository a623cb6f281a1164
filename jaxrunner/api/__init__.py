"""The parameters and outputs of users' calls, and how both are checked. Knows no JAX."""
