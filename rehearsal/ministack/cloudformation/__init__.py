"""CloudFormation: the types that the emulator lacks, and fixes of those that it has.

It assigns to MiniStack's table of handlers, whose shape is that of one version. One file for each
service's types, so that a type can be dropped as soon as MiniStack has it.
"""

from rehearsal.ministack.cloudformation import (
    deletion,
    ec2_types,
    ecs_types,
    fixes,
    fsx_types,
    iam_types,
)
from rehearsal.ministack.cloudformation.resource_type import checked
from rehearsal.ministack.internals import provisioners

TYPES = {**ec2_types.TYPES, **ecs_types.TYPES, **fsx_types.TYPES, **iam_types.TYPES}


def install() -> None:
    """Give the emulator the types above, and fix those that it has."""
    for name, kind in TYPES.items():
        if name in provisioners._RESOURCE_HANDLERS:
            raise RuntimeError(f"this emulator has a type {name} of its own")
        provisioners._RESOURCE_HANDLERS[name] = checked(name, kind)
        provisioners._REPLACING_PROPERTIES[name] = kind.replacing
        if "Tags" in kind.in_place:
            provisioners._STACK_TAG_PROPERTY[name] = ("Tags", "list")
    fixes.install()
    deletion.install()
