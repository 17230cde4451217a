"""The parts of the fake server (`penstock_loadtest.fake.server`): what it is told to do, and how that becomes bytes at
due times."""
