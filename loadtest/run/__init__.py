"""One run as it happens: the plan drawn ahead, requests sent on time, sessions, the terminal's panel, signals.

Not what is computed of its records (`results`), and not several runs (`studies`). May import client and what that may.
"""
