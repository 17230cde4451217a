"""What fits on which card, how fast it is and what it costs, by arithmetic alone. Pure.

Not measured (`penstock.cli.plan` measures a machine) and not loaded: a model is its shape, a card a row of a table.
GB are 10^9 bytes everywhere. May import wire and base, and the performance model beside it.
"""
