"""One tier as the daemon sees it: listings, manifests, policies, heads, intents, and deletions.

Part of `daemon`.
"""
