"""Other autoscalers' formulas, each from its source, and the clockwork around them.

A rule takes an observation and the time, and returns a target; `turns` asks it once a second. What it gets is what this
platform's autoscaler gets: the gateways' reports, a quarter of a second old.
"""
