"""What users pass and get: parameters, outputs, and how both are checked. Knows no JAX."""
