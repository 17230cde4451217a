"""Where sequences wait, are placed on a replica or a provider, and go on elsewhere when that is lost.

Life: `dispatcher` reads the routes (`route_states`), waits for a place (`waiting`), submits, and fills the receipt; the
answer comes through a `mailbox`. Not HTTP, and not the choice itself (`routing`). May import models, replicas,
providers, transport, routing and config; never completions.
"""
