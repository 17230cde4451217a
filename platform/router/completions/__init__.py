"""One generation request: authenticated, decoded, planned, admitted, run, and formatted as OpenAI's JSON.

Not the choice of a replica (`dispatch` makes it behind the `Dispatcher` protocol, and is never imported here).
May import models, replicas, providers, transport, routing and config.
"""
