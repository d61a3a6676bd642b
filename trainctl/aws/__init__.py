"""Calls to AWS: no other module of ``trainctl`` uses a client.

``deployment`` finds the two stacks and holds the rest, one module per concern: the standing
``cluster``, ``jobs``, the bucket's ``files``, ``logs``, ``sessions`` and the ``account``.
"""
