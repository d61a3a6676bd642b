"""Losses of an update: what it takes away from running hosts, from data, or from another stack.

Two templates are compared by the create-only properties of CloudFormation's own schemas, which the
caller asks for. ``make diff`` and ``trainctl doctor`` print the losses for the account in use; the
tests list the settings that have some, as docs/operations.md does.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

Template = Mapping[str, Any]
#: Returns the create-only properties of a type, as its schema has them: ``/properties/Name``.
CreateOnly = Callable[[str], Sequence[str]]

#: What a running host, or a job on it, stands on; of some types only what hosts and tasks name.
_STANDS_ON: Final = re.compile(
    "AWS::(EC2::(?!LaunchTemplate).*|ServiceDiscovery::.*|ECS::Cluster|FSx::FileSystem"
    "|StepFunctions::StateMachine|SecretsManager::Secret)"
)
_IF_NAMED: Final = re.compile("AWS::(IAM::.*|Logs::LogGroup)")
_NAMING: Final = re.compile("AWS::(EC2::LaunchTemplate|ECS::TaskDefinition|IAM::InstanceProfile)")
_LOGS: Final = "AWS::Logs::LogGroup"
_HOLDS: Final = re.compile(f"AWS::(S3::Bucket|ECR::Repository|FSx::FileSystem)|{_LOGS}")


def losses(
    before: Sequence[Template], after: Sequence[Template], create_only: CreateOnly
) -> Iterator[str]:
    """Losses of an update of the stacks, CoreStack before TrainingStack."""
    core, training = before
    imports = re.findall(r'"Fn::ImportValue": "[^"]*:(\w+)"', json.dumps(training))
    for name in sorted({*imports} & core["Outputs"].keys() - after[0]["Outputs"].keys()):
        yield f"export {name} is in use"
    for was, becomes in zip(before, after, strict=True):
        old, new = was["Resources"], becomes["Resources"]
        named = json.dumps([each for each in old.values() if _NAMING.fullmatch(each["Type"])])
        gone = {
            name
            for name in old
            if name not in new or _is_replaced(old[name], new[name], create_only)
        }
        # ECS refuses to give up a capacity provider that a task uses, and ends the update there.
        is_guarded = any(old[name]["Type"] == "AWS::ECS::CapacityProvider" for name in gone)
        for name in sorted(gone):
            policy = "UpdateReplacePolicy" if name in new else "DeletionPolicy"
            kind, is_named = old[name]["Type"], f'"{name}"' in named
            if old[name].get(policy) == "Retain":
                continue
            if _HOLDS.fullmatch(kind) and (kind != _LOGS or is_named):
                yield f"{name} ({kind}) holds data"
            elif not is_guarded and (
                _STANDS_ON.fullmatch(kind) or (_IF_NAMED.fullmatch(kind) and is_named)
            ):
                yield f"{name} ({kind}) goes"


def _is_replaced(old: Mapping[str, Any], new: Mapping[str, Any], create_only: CreateOnly) -> bool:
    before, after = old.get("Properties", {}), new.get("Properties", {})
    return old["Type"] != new["Type"] or (
        before != after
        and any(_at(before, path) != _at(after, path) for path in create_only(old["Type"]))
    )


def _at(properties: Any, path: str) -> Any:
    for name in path.removeprefix("/properties/").split("/"):
        properties = properties.get(name) if isinstance(properties, dict) else None
    return properties
