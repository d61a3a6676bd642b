"""Fork Ray's worker processes from one that has already imported torch, Ray Train and the recipe.

Ray starts a new Python for every worker, actor and task: on two cores, a run of two workers spends
nine tenths of its time up to the first step on the same imports, done again in each of them. On
Linux, a server imports once, and each process that Ray asks for is a fork of it. Anything that does
not fit is started by Ray as usual; ``TRAIN_FORK=0`` switches all of this off.

Four kinds of process:

    command or node            starts a ForkServer (parent.py), and has Ray call the client
    │                          (ray_hook.py)
    └─ server                  imports torch and what else needs no Ray (server.py, fitness.py)
       └─ server of a job      imports ray
          └─ ... of its workers   imports the recipe
    raylet
    └─ client                  what the raylet starts instead of Python (client.py): asks the server
                               for a fork, waits for its end, and ends in the same way

What is forked becomes what Ray has asked for in forked.py. Each file has the reasons for its
tricks.

When not to use it: for programs that are not this project's own recipes. A fork has modules that
such a program may want in another version. Only processes whose environment has TRAIN_PRELOAD are
forked, and ``training.runtime.driver`` sets that.
"""

import socket

from training.runtime.forkserver.client import NONE, PRELOAD, steps
from training.runtime.forkserver.forked import be_killed_with, become, use_threads_of_environment
from training.runtime.forkserver.parent import SWITCH, ForkServer
from training.runtime.forkserver.ray_hook import hook_ray
from training.runtime.forkserver.server import Server

__all__ = (
    "NONE",
    "PRELOAD",
    "SWITCH",
    "ForkServer",
    "be_killed_with",
    "hook_ray",
    "main",
    "steps",
    "use_threads_of_environment",
)


def main(arguments: list[str]) -> int:
    """The first server: listen on a file, end with a parent, import modules, and fork."""
    listener, parent, *modules = arguments
    server = Server(socket.socket(fileno=int(listener)), int(parent))
    server.import_all(modules)
    become(server.serve())
    return 0
