"""LoRA adapters: what one may look like, whose it is, and where its files lie."""
