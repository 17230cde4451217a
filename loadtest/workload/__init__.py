"""The requests of a scenario and their intended times: arrivals, prompts, lengths, sessions, published traces.

Pure, seeded and reproducible; files are read, and nothing is sent (`run`, `client`). May import scenario, planned and
errors.
"""
