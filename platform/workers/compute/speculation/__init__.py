"""Speculation: drafters guess tokens, the target verifies them in one step; how many is decided by what a guess is
worth."""
