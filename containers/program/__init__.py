"""The user's own program on the nodes of a job: its start, its end and its files."""
