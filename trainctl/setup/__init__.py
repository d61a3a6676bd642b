"""Set-up of a laptop, a checkout and an account, before jobs can run."""
