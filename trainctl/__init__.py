"""The command line of a deployment; ``trainctl.__main__`` is where it begins."""
