"""``trainctl local``: the whole system on this machine, without AWS."""
