"""What saves and restores a run."""
