"""The repositories of the two images, and the role by which a workflow on GitHub pushes them."""

from collections.abc import Sequence

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_iam as iam
from constructs import Construct

from stacks import rights

GITHUB_TOKENS = "token.actions.githubusercontent.com"


def image_repository(scope: Construct, id_: str) -> ecr.Repository:
    """A repository whose tags never change their meaning.

    Tagged images do not expire: ECR does not know which of them is deployed, and a change of
    sources adds only a few MB.
    """
    return ecr.Repository(
        scope,
        id_,
        image_tag_mutability=ecr.TagMutability.IMMUTABLE,
        image_scan_on_push=True,
        removal_policy=RemovalPolicy.DESTROY,
        empty_on_delete=True,
        lifecycle_rules=[
            ecr.LifecycleRule(
                rule_priority=1,
                description="Layers of failed pushes",
                tag_status=ecr.TagStatus.UNTAGGED,
                max_image_age=Duration.days(7),
            ),
        ],
    )


def image_push_role(
    scope: Construct,
    *,
    github_repository: str,
    branch: str,
    oidc_provider_arn: str,
    repositories: Sequence[ecr.Repository],
) -> iam.Role:
    """The role that the workflow of one branch of one repository may assume.

    Args:
        oidc_provider_arn: the account's provider for GitHub; empty: a new one.
    """
    if not oidc_provider_arn:
        oidc_provider_arn = iam.OidcProviderNative(
            scope,
            "GitHub",
            url=f"https://{GITHUB_TOKENS}",
            client_ids=["sts.amazonaws.com"],
            # An account has one, which others may have come to use.
            removal_policy=RemovalPolicy.RETAIN,
        ).oidc_provider_arn
    owner, _, name = github_repository.partition("/")
    # Repositories made or renamed since July 2026 have ids in their subject. None of the names can
    # hold "@", "/" or ":", so a wildcard stands for an id and nothing else.
    subjects = [
        f"repo:{repository}:ref:refs/heads/{branch}"
        for repository in dict.fromkeys((f"{owner}/{name}", f"{_with_id(owner)}/{_with_id(name)}"))
    ]
    role = iam.Role(
        scope,
        "ImagePushRole",
        description=f"Pushes images from {github_repository}",
        assumed_by=iam.WebIdentityPrincipal(
            oidc_provider_arn,
            {
                "StringEquals": {f"{GITHUB_TOKENS}:aud": "sts.amazonaws.com"},
                "StringLike": {f"{GITHUB_TOKENS}:sub": subjects},
            },
        ),
        max_session_duration=Duration.hours(1),
    )
    rights.of_image_push(repositories).grant(role)
    return role


def _with_id(name: str) -> str:
    """The name of an owner or repository with GitHub's id of it; a wildcard where it has none."""
    return name if "@" in name else f"{name}@*"
