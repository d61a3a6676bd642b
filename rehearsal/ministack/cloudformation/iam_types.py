"""Types of IAM: providers of OpenID Connect."""

from rehearsal.ministack.cloudformation.resource_type import (
    Properties,
    Result,
    Type,
    call,
    element,
    existing,
)
from rehearsal.ministack.internals import iam


# --- AWS::IAM::OIDCProvider ---------------------------------------------------------------------
def oidc_provider_create(logical_id: str, properties: Properties, _stack: str) -> Result:
    url = properties["Url"]
    if not url.startswith("https://"):
        raise ValueError(f"{logical_id}: Url is {url!r}, and must begin with https://")
    xml = call(logical_id, iam._create_oidc_provider({"Url": url}))
    arn = element(xml, "OpenIDConnectProviderArn")
    fill_oidc_provider(arn, properties)
    return arn, {"Arn": arn}


def oidc_provider_update(
    arn: str, _old: Properties, new: Properties, _stack: str, _logical_id: str
) -> Result:
    fill_oidc_provider(arn, new)
    return arn, {"Arn": arn}


def fill_oidc_provider(arn: str, properties: Properties) -> None:
    existing(iam._oidc_providers, arn, "OIDC provider").update(
        ClientIDList=list(properties.get("ClientIdList") or []),
        ThumbprintList=list(properties.get("ThumbprintList") or []),
        Tags=list(properties.get("Tags") or []),
    )


def oidc_provider_delete(arn: str, _properties: Properties) -> None:
    call(arn, iam._delete_oidc_provider({"OpenIDConnectProviderArn": arn}))


#: Which property replaces what is as the CloudFormation reference says.
TYPES = {
    "AWS::IAM::OIDCProvider": Type(
        create=oidc_provider_create,
        update=oidc_provider_update,
        delete=oidc_provider_delete,
        required=("Url",),
        replacing=("Url",),
        in_place=("ClientIdList", "Tags", "ThumbprintList"),
    ),
}
