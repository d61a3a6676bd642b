"""``trainctl local up``: build, deploy and start everything."""

from trainctl import output
from trainctl.commands.local import loading


def up() -> None:
    """Build the images, deploy the stacks, bring up a standing cluster of three containers.

    After a failure or Ctrl-C nothing of it is left; what a killed start has left is removed first.
    make local installs what this needs and runs it.
    """
    with loading.errors():
        loading.load_cycle().up()
    output.print_text(
        "Up. Send other commands there:\n"
        '  eval "$(trainctl local env)"\n'
        "  trainctl cluster status\n"
        "  trainctl shell -- ray status\n"
        "Remove everything: trainctl local down"
    )
