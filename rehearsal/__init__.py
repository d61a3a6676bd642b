"""Rehearsal: a local AWS on this machine, to which the unchanged stacks are deployed.

    python -m rehearsal start

It records resources and runs Lambda functions; it never reaches a real account. What runs inside
the emulator's own environment (``rehearsal.ministack``) cannot be imported from here: the project's
environment lacks the emulator on purpose, since both pin different botocores.
"""
