"""``trainctl cluster``: the standing cluster, a head and workers that stay until taken down.

What trains on it is started from a shell (``trainctl shell``). A job brings its own cluster.
"""
