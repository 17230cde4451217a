"""Speculation: drafters propose tokens, which the target verifies in one step.

Not how many are proposed (`engine.draft_lengths`), and not the verification (`sampling`). May import models,
sampling, batch and model_config of compute.
"""
