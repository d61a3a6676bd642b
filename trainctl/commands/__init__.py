"""The commands of ``trainctl``: one file each, called as the command is."""
