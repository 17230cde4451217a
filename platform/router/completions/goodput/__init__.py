"""Whether requests meet the targets of their class: the outcome of each, burn rates, and the metrics of both.

`outcome`, `burn_rate` and `busiest` are pure; `recorder` counts. Not the targets themselves (`wire.targets`), nor what
else goes by them.
"""
