"""Tests, and what they share. A regular package, so that no `tests` of an installed package is taken for it."""
