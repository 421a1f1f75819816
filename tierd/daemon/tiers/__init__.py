"""One tier as the daemon sees it: listings, manifests, policies, heads, intents, and deletions.

Part of `daemon`. What takes a store raises `StoreUnavailable` or `StoreRefused` if its tier fails to answer; a
docstring names these errors only where they mean more.
"""
