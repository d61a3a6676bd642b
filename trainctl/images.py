"""Images of a deployment's nodes: their addresses, and a check that they exist."""

from contract import nodes
from contract import outputs as stack_outputs
from trainctl.aws.cluster import NODES
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError

_OUTPUTS = {
    nodes.HEAD: stack_outputs.HEAD_REPOSITORY,
    nodes.WORKER: stack_outputs.WORKER_REPOSITORY,
}


def repositories(deployment: Deployment) -> dict[str, str]:
    """Names of the repositories that the nodes' images come from, by node.

    A head that trains runs the workers' image.
    """
    which = (nodes.WORKER,) if deployment.shape.head_trains else NODES
    return {node: deployment.output(_OUTPUTS[node]).partition("/")[2] for node in which}


def check_images(deployment: Deployment) -> None:
    """Called before hosts are started, which would only find that they cannot pull.

    Raises:
        CliError: a repository has no image with the tag that is deployed.
    """
    tag = deployment.shape.image_tag
    for node, repository in repositories(deployment).items():
        if not deployment.account.has_image(repository, tag):
            raise CliError(
                f"the {node}s' image is missing: {repository} has none with the tag {tag!r}. Build "
                "and push it with the sources that were deployed (make images), or deploy a tag "
                'that is there (make deploy ARGS="-c image_tag=...")'
            )
