"""LoRA adapters: what one may look like, which tenant owns it, and where its files lie.

Not the tensors (`workers.compute`), nor which replica has an adapter loaded (`router.replicas`). May import prefix,
perf, text, wire and base; never tenancy.
"""
