"""`penstock train-drafter`, offline: the target's own answers to given prompts, its hidden states over them, and a
small head trained to say the next token ahead of it.

Not what a replica loads (`compute.speculation.head`). May import compute, engine, config and text; nobody here imports
it.
"""
