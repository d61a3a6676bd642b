"""Benchmarks of this project, each side by side with the plain way to do the same thing.

Each prints one JSON object on stdout whose ``ratio`` is its headline figure (better
is larger). Nothing here is asserted in a test: speed depends on the machine.
"""
