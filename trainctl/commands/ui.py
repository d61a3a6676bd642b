"""``trainctl ui``: pages about jobs in the browser, from this machine."""

import webbrowser
from typing import Annotated

import typer

from trainctl import output
from trainctl.options import Browser, Where


def ui(
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="0: any free.")] = 0,
    browser: Browser = True,
    where: Where,
) -> None:
    """Show jobs, curves, nodes and logs in the browser, redrawn while they run, until Ctrl-C.

    The pages come from this machine, with your rights, and change nothing: only those who have
    their address, whose secret part stays the same, can read them.
    """
    from trainctl.ui.pages import Pages
    from trainctl.ui.server import Server

    with Server(Pages(where.find()), port=port) as server:
        output.print_text(server.url)
        if browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
