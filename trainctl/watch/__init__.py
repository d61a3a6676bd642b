"""A job while it runs: its log, its state, what it waits for."""
