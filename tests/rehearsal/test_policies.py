"""The policy evaluator decides as IAM does, and refuses what it does not know."""

from dataclasses import replace
from typing import Any, Final

import pytest

from rehearsal.policies import Call, PolicyError, Statement, allows, parse

ACCOUNT: Final = "111122223333"
ROLE: Final = f"arn:aws:iam::{ACCOUNT}:role/r"
GET: Final = Call(caller=ROLE, action="s3:GetObject", resource="arn:aws:s3:::b/k")


def statement(effect: str = "Allow", **elements: Any) -> Statement:
    given = {"Effect": effect, "Action": "s3:GetObject", "Resource": "*"} | elements
    (found,) = parse({"Statement": {name: each for name, each in given.items() if each}})
    return found


def test_nothing_is_allowed_by_no_policy() -> None:
    assert not allows(GET)


@pytest.mark.parametrize(
    ("elements", "is_allowed"),
    [
        ({}, True),
        ({"Action": "S3:get*"}, True),
        ({"Action": ["s3:PutObject", "s3:GetObj?ct"]}, True),
        ({"Action": "s3:GetObjectAcl"}, False),
        ({"Resource": "arn:aws:s3:::b/*"}, True),
        ({"Resource": "arn:aws:s3:::B/*"}, False),
        ({"Resource": "arn:aws:s3:::b"}, False),
    ],
)
def test_actions_and_resources_are_patterns(elements: dict[str, Any], is_allowed: bool) -> None:
    assert allows(GET, identity=[statement(**elements)]) is is_allowed


def test_one_statement_that_denies_is_enough() -> None:
    deny = statement("Deny", Resource="arn:aws:s3:::b/*")
    assert not allows(GET, identity=[statement(), deny])
    assert allows(replace(GET, resource="arn:aws:s3:::c/k"), identity=[statement(), deny])


@pytest.mark.parametrize(
    ("operator", "wanted", "value", "is_met"),
    [
        ("StringEquals", ["a", "b"], "b", True),
        ("StringEquals", "a*", "ab", False),
        ("StringLike", "a*", "ab", True),
        ("ArnEquals", "arn:aws:ecs:*:1:cluster/c", "arn:aws:ecs:r:1:cluster/c", True),
        ("ArnEquals", "arn:aws:ecs:*:cluster/c", "arn:aws:ecs:r:1:cluster/c", False),
        ("Bool", "false", "False", True),
        ("NumericLessThan", "1.2", "1.10", True),
        ("NumericLessThan", 1.2, "1.3", False),
        ("StringEquals", "a", None, False),
    ],
)
def test_conditions(operator: str, wanted: Any, value: str | None, is_met: bool) -> None:
    keys = {} if value is None else {"AWS:Key": value}
    found = statement(Condition={operator: {"aws:key": wanted}})
    assert allows(replace(GET, keys=keys), identity=[found]) is is_met


@pytest.mark.parametrize("user", ["AROA1:anna@example.com", "AROA1:an", None])
@pytest.mark.parametrize(
    "elements",
    [
        {"Resource": "arn:aws:s3:::b/${aws:userid}/*"},
        {"Condition": {"StringEquals": {"aws:ResourceTag/user-id": "${aws:userid}"}}},
    ],
)
def test_the_id_of_the_caller_is_a_variable(elements: dict[str, Any], user: str | None) -> None:
    keys = {"aws:ResourceTag/user-id": "AROA1:anna@example.com"}
    keys |= {"aws:userid": user} if user else {}
    call = replace(GET, resource="arn:aws:s3:::b/AROA1:anna@example.com/k", keys=keys)
    is_own = user == "AROA1:anna@example.com"
    assert allows(call, identity=[statement(**elements)]) is is_own


@pytest.mark.parametrize(
    ("principal", "caller", "is_allowed"),
    [
        ("*", ROLE, True),
        ({"AWS": "*"}, ROLE, True),
        ({"AWS": ROLE}, ROLE, True),
        ({"AWS": [f"{ROLE}2"]}, ROLE, False),
        ({"AWS": f"arn:aws:iam::{ACCOUNT}:root"}, ROLE, False),
        ({"Service": "events.amazonaws.com"}, "events.amazonaws.com", True),
        ({"Service": "events.amazonaws.com"}, "ec2.amazonaws.com", False),
    ],
)
def test_a_resource_says_whom_it_lets_in(principal: Any, caller: str, is_allowed: bool) -> None:
    found = statement(Principal=principal)
    assert allows(replace(GET, caller=caller), resource=[found]) is is_allowed


def test_an_account_as_principal_denies_to_all_of_it() -> None:
    deny = statement("Deny", Principal={"AWS": f"arn:aws:iam::{ACCOUNT}:root"})
    assert not allows(GET, identity=[statement()], resource=[deny])


@pytest.mark.parametrize(
    ("elements", "message"),
    [
        ({"Condition": {"DateLessThan": {"aws:CurrentTime": "x"}}}, "operators: DateLessThan"),
        ({"Condition": {"StringNotEquals": {"aws:k": "x"}}}, "operators: StringNotEquals"),
        ({"Resource": "arn:aws:s3:::${aws:username}"}, "variables"),
        ({"NotPrincipal": "*"}, "elements of a statement: NotPrincipal"),
        ({"Principal": {"CanonicalUser": "x"}}, "principals: CanonicalUser"),
        ({"Effect": "allow"}, "effect: 'allow'"),
        ({"NotAction": "s3:*"}, "elements of a statement: NotAction"),
        ({"Action": None}, "without an Action"),
    ],
)
def test_what_is_not_known_is_an_error_and_no_pass(elements: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        statement(**elements)
