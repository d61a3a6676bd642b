"""What runs on a node of the cluster: it starts Ray, watches it, and says why it ended."""
