"""``trainctl ui``: pages about jobs in the browser, from this machine."""

import webbrowser

from trainctl import output
from trainctl.options import Browser, WhereOrHere


def ui(*, browser: Browser = True, where: WhereOrHere) -> None:
    """Show jobs, curves, nodes and logs in the browser, redrawn while they run, until Ctrl-C.

    The pages come from this machine, with your rights, and change nothing: only those who have
    their address, which is new each time, can read them.
    """
    from trainctl.ui.pages import Pages
    from trainctl.ui.server import Server

    with Server(Pages(where.find())) as server:
        output.print_text(server.url)
        if browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
