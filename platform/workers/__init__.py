"""The engine: paged KV, one-phase scheduler, models, kernels, sampling, and the replica that serves it on the token
stream."""
