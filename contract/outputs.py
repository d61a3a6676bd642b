"""Stack names and outputs by which the command line finds a deployment."""

from typing import Final

CORE_STACK: Final = "CoreStack"
TRAINING_STACK: Final = "TrainingStack"

# For those who call `aws` themselves: trainctl reads neither.
VPC: Final = "VpcId"
NAMESPACE: Final = "NamespaceName"  # in Cloud Map
# The command line reads these; renaming one breaks it.
BUCKET: Final = "BucketName"
CLUSTER: Final = "ClusterName"
HEAD_SERVICE: Final = "HeadServiceName"
WORKER_SERVICE: Final = "WorkerServiceName"
HEAD_TASK: Final = "HeadTaskDefinition"
WORKER_TASK: Final = "WorkerTaskDefinition"
HEAD_REPOSITORY: Final = "HeadRepositoryUri"
WORKER_REPOSITORY: Final = "WorkerRepositoryUri"
LOG_GROUP: Final = "LogGroupName"
SUBNET: Final = "TrainingSubnetId"
WORKER_PROVIDER: Final = "WorkerCapacityProvider"
JOBS: Final = "JobStateMachineArn"
KEEPER: Final = "JobKeeperName"
TASK_EVENTS: Final = "TaskEventsLogGroupName"
DASHBOARD: Final = "DashboardName"
RAY_TOKEN: Final = "RayTokenSecretArn"  # what Ray's dashboard and its clients must show
PUSH_ROLE: Final = "ImagePushRoleArn"
SHARED: Final = "SharedFileSystemId"  # where hosts mount one
SHAPE: Final = "ClusterShape"  # JSON: preset, hosts, counts, limits, image tag, order
