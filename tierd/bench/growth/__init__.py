"""`tierd bench growth`: costs that must not grow with a state, a run or a node, measured beside others in one run."""
