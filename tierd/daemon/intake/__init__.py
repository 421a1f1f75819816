"""Take checkpoints of other programs into the spool, and put them back where the programs look for them.

- `intake`: the watches of a daemon, each in a thread of its own; `active_watch`: one of them; `watch_reports`: their
  reports.
- `unit_watch`: one watched directory: takes each unit that is due; synchronous. `unit_order`: in which order;
  `unit_refusals`: what it does not take, and why; `unit_files`: one unit's files into a stage.
- `taken_units`: the record of what was taken, beside the spool's other records; `taken_record`: its content.
- `watch_records`: keeps two directories from becoming one run.
- `unit_import`: the checkpoints at a path or URL into tiers, once, without a daemon; `import_bucket`: from a bucket.
- `in_place_restore`: a checkpoint from the tiers back into a directory; `series_restore`: the newest of each series.
- `directory_preparation`: verifies a directory before a launch, and replaces what is damaged; `unit_verdict` and
  `damaged_units` judge its units.
- `directory_changes`: one command at a time in a program's directory, and each change by one rename.

Invariant: a watch never writes to its directory. A unit counts as taken only if a listing after its last byte was read
shows it unchanged.

The rest of `daemon`, and `cli`, import this package.
"""
