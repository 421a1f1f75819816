"""What `tierd doctor` makes of what it observed: a table of findings, and the functions that choose among them.

It holds decisions only; `tierd/doctor/` observes. `doctor`, `cli` and tests may import it.
"""
