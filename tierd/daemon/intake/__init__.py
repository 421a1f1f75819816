"""Take checkpoints of other programs into the spool, and put them back where the programs look for them.

Invariant: a watch never writes to its directory. A unit counts as taken only if a listing after its last byte was read
shows it unchanged.

The rest of `daemon`, and `cli`, import this package.
"""
