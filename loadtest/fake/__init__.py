"""A fake OpenAI-compatible server (`penstock_loadtest.fake.server`): what it is to do, and how that becomes bytes at
due times.

Not the tester's own sending (`client`), of which it uses the schedule only. May import client.schedule, scenario,
checks and errors.
"""
