"""This host, as a node and its program see it: its log, addresses, processes and devices."""
