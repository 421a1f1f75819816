"""The daemon's HTTP server: metrics, probes, `status` and `runs` as JSON, and the page. Off without a `[http]` table.

Invariant: no request changes anything, reads a tier, or holds the daemon up. May be imported by
`daemon/daemon_service.py`, which imports the modules that need aiohttp and prometheus-client only if the server is
configured.
"""
