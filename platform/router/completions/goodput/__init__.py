"""Whether requests meet the targets of their class: the outcome of each, burn rates, and the metrics of both."""
