"""Images of a deployment's nodes: their addresses, and a check that they exist."""

from collections.abc import Sequence

from contract import nodes
from contract.outputs import REPOSITORIES
from trainctl.aws.deployment import Deployment
from trainctl.aws.errors import CliError
from trainctl.aws.standing_cluster import NODES


def repositories(deployment: Deployment) -> dict[str, str]:
    """Names of the repositories that the nodes' images come from, by node.

    A head that trains runs the workers' image.
    """
    which = (nodes.WORKER,) if deployment.shape.head_trains else NODES
    return {node: deployment.output(REPOSITORIES[node]).partition("/")[2] for node in which}


def check_image(deployment: Deployment, repository: str, tag: str) -> str:
    """The address of an image in a repository.

    Raises:
        CliError: the repository has none with its tag.
    """
    if not deployment.account.has_image(repository, tag):
        raise CliError(
            f"{repository} has no image with the tag {tag!r}, which is deployed: build and push it "
            "with the sources that were deployed (make images), or deploy a tag that is there "
            '(make deploy ARGS="-c image_tag=...")'
        )
    return f"{repository}:{tag}"


def check_images(deployment: Deployment, worker_tags: Sequence[str] = ()) -> None:
    """Called before hosts are started, which would only find that they cannot pull.

    Args:
        worker_tags: tags of the workers' images; by default the deployment's.

    Raises:
        CliError: an image is missing.
    """
    own = deployment.shape.image_tag
    for node, repository in repositories(deployment).items():
        for tag in {*worker_tags} if worker_tags and node == nodes.WORKER else (own,):
            check_image(deployment, repository, tag)
