"""Shares of the replicas: what each tenant has had, and what follows from it for the order of those that wait.

All pure: `counters` count by tenant, `charges` say what a sequence costs, `place_shares` keep a few places free. Not
the queue (`dispatch.waiting`), and not what gateways tell each other (`tenancy.service_exchange`).
"""
