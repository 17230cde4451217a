"""What crosses a process boundary: the OpenAI schema, stream frames, the load report, errors. Data only, no I/O."""
