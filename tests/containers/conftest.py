"""Shares the synthesized templates with the tests of the nodes."""

from tests.stacks.conftest import synth

__all__ = ["synth"]
