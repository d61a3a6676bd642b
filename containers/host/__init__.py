"""The host under a node: its log, addresses, processes and devices."""
