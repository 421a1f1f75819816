"""Convert training state to typed JSON and safetensors, and load it back.

The package takes a state apart, plans the layout of its tensor file, and puts a stored state back into live objects. It
knows nothing of runs, daemons or tiers. It imports torch, `core` and the spool's I/O; `client`, `dcp`, `reading`,
`check` and `adapters` import it.
"""
