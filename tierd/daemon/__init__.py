"""The node's daemon: observe, plan, act, until there is nothing left to do."""
