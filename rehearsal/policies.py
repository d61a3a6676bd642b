"""Policy evaluation as IAM does it inside one account.

    statements = parse(document)
    allows(Call(caller=role, action="s3:PutObject", resource=arn), identity=statements)

The standard library only: the local AWS asks it for every call of a role, and tests ask it for the
synthesized templates. What it does not know (an element, an operator, another policy variable than
``${aws:userid}``) is a PolicyError and never a pass, so it has to know no more than this project's
policies use. It leaves out what they do not have: permission boundaries, session policies,
organizations, other accounts.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq

ELEMENTS = {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}

Values = Sequence[str]
USER_ID = "${aws:userid}"


class PolicyError(ValueError):
    """A policy has something that this evaluator does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call, as policies see it."""

    caller: str
    """ARN of a role, or the name of a service, such as ``events.amazonaws.com``."""
    action: str
    """Such as ``s3:PutObject``."""
    resource: str
    """Its ARN; ``*`` for an action that has no resource."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Condition keys of the request and their values; the case of a key does not matter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """One statement of a policy document."""

    effect: str
    principals: Values
    """Role ARNs, account ids, names of services or ``*``; empty in the policy of a role."""
    actions: Values
    resources: Values
    conditions: Mapping[str, Mapping[str, Values]]
    """Operator -> key -> values."""

    def applies_to(self, call: Call) -> bool:
        """True if the statement covers a call: its action and resource, under its conditions."""
        keys = {name.lower(): value for name, value in call.keys.items()}
        return (
            any(_fits(pattern.lower(), call.action.lower()) for pattern in self.actions)
            and any(_fits(pattern, call.resource) for pattern in _filled(self.resources, keys))
            and all(
                _holds(operator, keys.get(key.lower()), _filled(values, keys))
                for operator, tests in self.conditions.items()
                for key, values in tests.items()
            )
        )

    def names(self, caller: str) -> bool:
        """True if the statement of a resource's policy covers this caller.

        An account as a principal lets its administrators decide: it denies, but does not allow.
        """
        is_account = any(_is_account(each) for each in self.principals)
        return (
            caller in self.principals
            or "*" in self.principals
            or (self.effect == "Deny" and is_account)
        )


def allows(
    call: Call, *, identity: Iterable[Statement] = (), resource: Iterable[Statement] = ()
) -> bool:
    """True if a call is allowed: one statement has to allow it, and none may deny it.

    Args:
        identity: of the role that calls; none for a service.
        resource: of the resource that is called, if it has a policy.
    """
    found = [
        *(each for each in identity if each.applies_to(call)),
        *(each for each in resource if each.names(call.caller) and each.applies_to(call)),
    ]
    return bool(found) and all(each.effect == "Allow" for each in found)


def parse(document: object) -> list[Statement]:
    """The statements of a policy document, as JSON has it.

    Raises:
        PolicyError: something in it is not known here.
    """
    if not isinstance(document, Mapping):
        raise PolicyError(f"not a policy document: {document!r}")
    statements = document.get("Statement", [])
    return [
        _statement(each) for each in (statements if isinstance(statements, list) else [statements])
    ]


def _statement(statement: Mapping[str, object]) -> Statement:
    if unknown := statement.keys() - ELEMENTS:
        raise PolicyError(f"unknown elements of a statement: {', '.join(sorted(unknown))}")
    if statement.get("Effect") not in ("Allow", "Deny"):
        raise PolicyError(f"unknown effect: {statement.get('Effect')!r}")
    if "Action" not in statement:
        raise PolicyError(f"a statement without an Action: {statement!r}")
    conditions = {
        operator: {key: _listed(values) for key, values in tests.items()}
        for operator, tests in _mapping(statement.get("Condition")).items()
        if isinstance(tests, Mapping)
    }
    if unknown := conditions.keys() - OPERATORS.keys():
        raise PolicyError(f"unknown condition operators: {', '.join(sorted(unknown))}")
    resources = _listed(statement.get("Resource", "*"))
    texts = [*resources, *(v for tests in conditions.values() for vs in tests.values() for v in vs)]
    if variables := [text for text in texts if "${" in text.replace(USER_ID, "")]:
        raise PolicyError(f"policy variables are not known: {', '.join(variables)}")
    return Statement(
        effect=str(statement["Effect"]),
        principals=_principals(statement.get("Principal")),
        actions=_listed(statement["Action"]),
        resources=resources,
        conditions=conditions,
    )


def _principals(value: object) -> Values:
    if value is None:
        return []
    if value == "*":
        return ["*"]
    by_kind = _mapping(value)
    if unknown := by_kind.keys() - {"AWS", "Service", "Federated"}:
        raise PolicyError(f"unknown kinds of principals: {', '.join(sorted(unknown))}")
    return [each for values in by_kind.values() for each in _listed(values)]


def _is_account(principal: str) -> bool:
    return bool(re.fullmatch(r"\d{12}|arn:[\w-]+:iam::\d{12}:root", principal))


def _mapping(value: object) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise PolicyError(f"not an object: {value!r}")
    return value


def _listed(value: object) -> Values:
    return [str(each) for each in (value if isinstance(value, list) else [value])]


# --- variables, patterns and conditions -----------------------------------------------------------
def _filled(patterns: Values, keys: Mapping[str, str]) -> Values:
    """Patterns with the caller's id; without those that need it where the request has none."""
    user = keys.get(USER_ID[2:-1])
    assert not {*"*?"} & {*(user or "")}, "a wildcard in an id would be one in the pattern"
    return [each.replace(USER_ID, user or "") for each in patterns if user or USER_ID not in each]


def _fits(pattern: str, text: str) -> bool:
    """True if a text matches a pattern: ``*`` is any text and ``?`` one character."""
    parts = [{"*": ".*", "?": "."}.get(each, re.escape(each)) for each in pattern]
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None


def _arn_fits(pattern: str, text: str) -> bool:
    """As ``_fits``, within each of an ARN's six parts."""
    patterns, texts = pattern.split(":", 5), text.split(":", 5)
    return len(patterns) == len(texts) == 6 and all(map(_fits, patterns, texts))


def _bool_equals(pattern: str, text: str) -> bool:
    return pattern.lower() == text.lower()


def _is_less(limit: str, text: str) -> bool:
    return float(text) < float(limit)


#: Compare a value of the policy with that of the request. ArnEquals takes patterns too.
OPERATORS: Mapping[str, Callable[[str, str], bool]] = {
    "StringEquals": eq,
    "ForAllValues:StringEquals": eq,  # of a request with one value
    "StringLike": _fits,
    "ArnEquals": _arn_fits,
    "ArnLike": _arn_fits,  # of a function's policy, which AWS writes for AWS::Lambda::Permission
    "Bool": _bool_equals,
    "NumericLessThan": _is_less,
}


def _holds(operator: str, value: str | None, wanted: Values) -> bool:
    """True if a condition is met; it never is if the request lacks the key."""
    return value is not None and any(OPERATORS[operator](each, value) for each in wanted)
