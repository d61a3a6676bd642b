"""The bucket of data, checkpoints and results."""

from aws_cdk import Duration, RemovalPolicy
from aws_cdk import aws_s3 as s3
from constructs import Construct

from contract import runs
from stacks import findings

# Records of a run are small and stay where they are; checkpoints and models are what costs.
LARGE_FILE_BYTES = 1024 * 1024
ARCHIVE_AFTER = Duration.days(30)


def new_bucket(scope: Construct, *, retain: bool) -> s3.Bucket:
    """A private bucket; large files of runs are archived."""
    uploads = s3.LifecycleRule(
        id="stale-uploads", abort_incomplete_multipart_upload_after=Duration.days(1)
    )
    # Nothing is lost: a run resumes from Glacier as before, only reading it costs more.
    archive = s3.Transition(
        storage_class=s3.StorageClass.GLACIER_INSTANT_RETRIEVAL, transition_after=ARCHIVE_AFTER
    )
    checkpoints = s3.LifecycleRule(
        id="old-checkpoints",
        prefix=f"{runs.RUNS_PREFIX}/",
        object_size_greater_than=LARGE_FILE_BYTES,
        transitions=[archive],
    )
    boots = s3.LifecycleRule(
        id="old-boots", prefix=f"{runs.HOSTS_PREFIX}/", expiration=Duration.days(90)
    )
    bucket = s3.Bucket(
        scope,
        "Bucket",
        block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
        object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
        encryption=s3.BucketEncryption.S3_MANAGED,
        enforce_ssl=True,
        minimum_tls_version=1.2,
        # See docs/security.md: "What a job may delete".
        versioned=False,
        removal_policy=RemovalPolicy.RETAIN if retain else RemovalPolicy.DESTROY,
        auto_delete_objects=not retain,
        lifecycle_rules=[uploads, checkpoints, boots],
    )
    resource = bucket.node.default_child
    assert isinstance(resource, s3.CfnBucket)
    # CloudFormation's schema has text here, and CDK writes a number.
    resource.add_property_override(
        "LifecycleConfiguration.Rules.1.ObjectSizeGreaterThan", str(LARGE_FILE_BYTES)
    )
    findings.accept(bucket, findings.BUCKET)
    return bucket
