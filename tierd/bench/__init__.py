"""Benchmarks that ship with tierd: the cost of a save to training, compared with other libraries and the machine."""
