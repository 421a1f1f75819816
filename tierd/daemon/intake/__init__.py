"""Take checkpoints of other programs into the spool, and put them back where the programs look for them.

- `unit_watch`: one watched directory: takes each unit that is due; synchronous.
- `ordering`: the order in which units are taken, and what is in doubt about it.
- `taking`: one unit's files into a stage.
- `importing`: the checkpoints at a path or URL into tiers, once, without a daemon.
- `origin`, `bucket`: where an import reads: a directory, or a bucket.
- `taker`: which of several nodes that watch one directory takes.
- `taken`: the record of what was taken, beside the spool's other records; `taken_record`: its content.
- `intake`: the watches of a daemon, each in a thread of its own.
- `manifests`: a manifest from the first place that has it right.
- `directory_lock`: one command at a time in a program's directory.
- `in_place`: a checkpoint from the tiers back into a directory.
- `prepare`: verifies a directory before a launch, and replaces what is damaged.

Invariant: a watch never writes to its directory. A unit counts as taken only if a listing after its last byte was read
shows it unchanged.

`service` and `cli` import this package.
"""
