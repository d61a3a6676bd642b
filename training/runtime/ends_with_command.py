"""First import in the server of ``--local``'s workers: it then ends with the command, also while
it still loads the rest."""

from training.runtime import processes

processes.end_with_parent()
