"""Events for people and programs: the journal, alerts, and the notifier that sends events to webhooks and commands.

The package runs in the daemon. It imports `core`, `stores` (to read private files), `spool` and `threads`; `daemon` and
`cli` import it.
"""
