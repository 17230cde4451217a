"""Everything between text and token ids: tokenizer, chat template, incremental detokenizer, stop strings; and where a
checkpoint lies and what identifies it.

Not its weights (`workers.compute`). No torch. May import wire and base; never perf or prefix.
"""
