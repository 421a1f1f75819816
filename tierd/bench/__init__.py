"""Measurements that ship with tierd: what saving costs training, beside its peers and the machine's own limits."""
