"""``trainctl ui``: pages about jobs, on this machine only."""
