"""Block hashing and the prefix index: which replica holds which KV blocks. The index itself is pure; Redis lives in
`store` alone."""
