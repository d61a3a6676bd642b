"""A user's own program on the nodes of a job: how it starts, and what becomes of its files."""
