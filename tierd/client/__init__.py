"""The code in the training process: `Checkpointer`, its connection to the daemon, when to save, and a launch's end.

The package imports `state`, `ipc`, `spool` and `core`, and neither asyncio nor a store. `dcp`, `exporting`, `reading`,
`adapters`, `bench` and `check` import it.
"""
