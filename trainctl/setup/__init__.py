"""What a laptop, a checkout and an account need before jobs can run."""
