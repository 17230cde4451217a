"""Tokenizer, chat template, incremental detokenizer, stop strings, model identity. No torch."""
