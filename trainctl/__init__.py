"""The command line of a deployment: submit, follow, stop. Reserved; see ``trainctl.__main__``."""
