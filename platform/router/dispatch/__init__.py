"""Where sequences wait, are placed on a replica or a provider, and go on elsewhere when that is lost.

Not HTTP, and not the choice itself (`routing`). May import models, replicas, providers, transport, routing and config;
never completions.
"""
