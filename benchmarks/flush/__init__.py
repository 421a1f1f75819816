"""The flush path's benchmark: `python benchmarks/flush` runs it, each arm in a process of its own."""
