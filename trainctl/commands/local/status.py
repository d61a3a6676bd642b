"""``trainctl local status``: what of it exists."""

from trainctl import output
from trainctl.commands.local import loading
from trainctl.options import AsJson


def status(*, as_json: AsJson = False) -> None:
    """Show what of it exists."""
    with loading.errors():
        found = loading.load_cycle().Rehearsal.here().status()
    if as_json:
        output.print_json(found)
    elif not any(found[what] for what in ("processes", "containers", "networks")):
        output.print_text("Nothing is up. Start it: trainctl local up")
    else:
        output.print_table(["what", "found"], [[name, str(value)] for name, value in found.items()])
        if not found["aws_answers"]:
            output.say("the local AWS does not answer: trainctl local down removes what is left")
