"""Restore: choose one checkpoint on all ranks, and read its bytes from the places that hold it. Part of `client`."""
