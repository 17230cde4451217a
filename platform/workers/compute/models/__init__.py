"""Models of the Llama family: their description, and their forward pass over a paged KV cache."""
