"""Faults about a simulated autoscaler: gateways' reports that stay out, a controller that errs, an end in mid-scale,
GPUs that lack."""
