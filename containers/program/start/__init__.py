"""Start of a user's program: its code, packages, environment and processes."""
