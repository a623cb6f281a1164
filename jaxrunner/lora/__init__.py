"""LoRA adapters (arXiv:2106.09685): several on the device, and each request has its own or none."""
