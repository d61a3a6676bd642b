"""Authorization of calls by the deployed policies. Imported inside ``.venv-aws`` only.

The policies of the role that calls, and those of what is called: of buckets, functions, secrets,
repositories and log groups. ``rehearsal.policies`` decides.

Service-linked roles are missing until they are asked for, as in an account that never used a
service, and have AWS's names.
"""

import json
from collections.abc import Iterator
from typing import Any

from rehearsal.ministack.internals import cloudwatch_logs, iam, iam_evaluator, responses
from rehearsal.policies import Call, Statement, allows, parse

#: Requests reach the emulator without TLS, which ends before it. A policy that wants TLS is met.
TRANSPORT = {"aws:SecureTransport": "true", "s3:TlsVersion": "1.3"}


def is_allowed(call: Call) -> bool:
    """True if policies allow a call by a role or service. Any other caller is the account's
    administrator, who may make every call.

    Raises PolicyError if a policy contains an unknown element.
    """
    is_role = ":role/" in call.caller
    if not (is_role or call.caller.endswith(".amazonaws.com")):
        return True
    asked = Call(
        caller=call.caller,
        action=call.action,
        resource=call.resource,
        keys={**TRANSPORT, **call.keys},
    )
    identity = of_role(call.caller) if is_role else ()
    return allows(asked, identity=identity, resource=of_resource(call.resource))


def of_role(arn: str) -> Iterator[Statement]:
    """Statements of a role's policies; none of a role that is not there any more."""
    account = arn.split(":")[4]
    role = iam._roles.get_scoped(account, None, arn.rpartition("/")[2]) or {}
    for document in (role.get("InlinePolicies") or {}).values():
        yield from parse(_json(document))
    for policy in role.get("AttachedPolicies") or []:
        yield from parse(_json(iam_evaluator._resolve_managed_policy_document(policy, account)))


def of_resource(arn: str) -> Iterator[Statement]:
    """Statements of the policies of a resource; none where it has no policy."""
    service = arn.split(":")[2] if arn.startswith("arn:") else ""
    if service == "logs":
        # They are of the account, and each of their statements says for which groups.
        for policy in cloudwatch_logs._resource_policies.values():
            yield from parse(_json(policy["policyDocument"]))
    elif (found := iam_evaluator._resource_policy(service, arn)) and found[0]:
        yield from parse(_json(found[0]))


def of_service(service: str, action: str, resource: str, *, source: str = "") -> bool:
    """True if a service may make a call on behalf of ``source``, an ARN."""
    keys = {"aws:SourceAccount": responses.get_account_id()}
    if source:
        keys["aws:SourceArn"] = source
    return is_allowed(Call(caller=service, action=action, resource=resource, keys=keys))


def _json(document: Any) -> Any:
    return json.loads(document) if isinstance(document, str) else document
