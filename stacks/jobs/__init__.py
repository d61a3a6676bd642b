"""Jobs: the state machine, the head's task and the keeper."""
