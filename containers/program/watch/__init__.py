"""Signs of life of a user's program, and the reason of its end."""
