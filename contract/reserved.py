"""Beginnings of names that AWS reserves.

CloudFormation generates names that begin with the deployment's, so these are refused there too.
"""

from collections.abc import Mapping
from typing import Final

#: Type -> beginnings, in small letters.
RESERVED: Final[Mapping[str, tuple[str, ...]]] = {
    # API reference of EC2, CreateSecurityGroup; kubernetes-sigs/cluster-api-provider-aws#1725.
    "AWS::EC2::SecurityGroup": ("sg-",),
    # In any case of letters: API reference of ECS, CreateCapacityProvider; aws/aws-cdk#29151,
    # #17321, #36584.
    "AWS::ECS::CapacityProvider": ("aws", "ecs", "fargate"),
    # User guide of S3, "General purpose bucket naming rules".
    "AWS::S3::Bucket": ("xn--", "sthree-", "amzn-s3-demo-"),
}
