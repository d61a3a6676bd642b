"""Ground of training: this machine, storage, and the lease of a run."""
