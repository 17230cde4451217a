"""What is asked of the server, and when: pure, seeded, reproducible."""
