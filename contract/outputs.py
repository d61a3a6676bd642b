"""Stack names and outputs by which the command line finds a deployment."""

from typing import Final

from contract import nodes

CORE_STACK: Final = "CoreStack"
TRAINING_STACK: Final = "TrainingStack"


def stacks(deployment: str) -> tuple[str, str]:
    """Names of CoreStack and TrainingStack; of the deployment without a name: ""."""
    prefix = f"{deployment}-" if deployment else ""
    return f"{prefix}{CORE_STACK}", f"{prefix}{TRAINING_STACK}"


# For people and their own programs: trainctl reads none of these.
VPC: Final = "VpcId"
NAMESPACE: Final = "NamespaceName"  # in Cloud Map
SHARED: Final = "SharedFileSystemId"  # where hosts mount one
# Policies to attach to people: look; start jobs and stop one's own; stop all, and more.
READ: Final = "ReadPolicyArn"
SUBMIT: Final = "SubmitPolicyArn"
OPERATE: Final = "OperatePolicyArn"
# The command line reads these; renaming one breaks it.
BUCKET: Final = "BucketName"
CLUSTER: Final = "ClusterName"
HEAD_SERVICE: Final = "HeadServiceName"
WORKER_SERVICE: Final = "WorkerServiceName"
HEAD_TASK: Final = "HeadTaskDefinition"
WORKER_TASK: Final = "WorkerTaskDefinition"
REPOSITORIES: Final = {nodes.HEAD: "HeadRepositoryUri", nodes.WORKER: "WorkerRepositoryUri"}
PUSH_ROLE: Final = "ImagePushRoleArn"  # of CI, where it pushes images
NOTICES: Final = "NoticesTopicArn"  # mails about the ends of jobs
LOG_GROUP: Final = "LogGroupName"
SUBNET: Final = "TrainingSubnetId"
WORKER_PROVIDER: Final = "WorkerCapacityProvider"
JOBS: Final = "JobStateMachineArn"
KEEPER: Final = "JobKeeperName"
TASK_EVENTS: Final = "TaskEventsLogGroupName"
DASHBOARD: Final = "DashboardName"
RAY_TOKEN: Final = "RayTokenSecretArn"  # what Ray's dashboard and its clients must show
SHAPE: Final = "ClusterShape"  # JSON: preset, hosts, counts, limits, image tag, order
