"""Products of LoRA adapters."""
