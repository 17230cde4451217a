"""Grammars of constrained answers: compiled by llguidance for a model's vocabulary, followed token by token, and made
into masks beside the model's steps.

Not what a constraint means (`text.grammar`), and not the choice of a token (`sampling`). May import the engine only.
"""
