"""`penstock tiers`: labelled prompts through two models, what escalating some of them gives, and the threshold for it.

Not the escalation itself (`router.completions.escalation`). May import whatever commands may.
"""
