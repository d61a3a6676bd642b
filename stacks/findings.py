"""Findings of the rule checkers that stand, each with its reason.

Written where the resource is made, read by cdk-nag; ``docs/security.md`` explains the more
important ones. A finding without a reason fails ``make check``.
"""

from collections.abc import Mapping

from aws_cdk import Acknowledgment, Validations
from constructs import IConstruct


def accept(construct: IConstruct, findings: Mapping[str, str]) -> None:
    """Accept ``findings`` (rule, or ``rule[finding]`` -> reason) of ``construct`` and its parts."""
    Validations.of(construct).acknowledge(
        *(Acknowledgment(id=rule, reason=reason) for rule, reason in findings.items())
    )
