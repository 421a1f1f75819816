"""State that ranks hold alike: who stores, sends and reads which part of it, and whether the copies differ.

Part of `core`: pure, and imports only `core`.
"""
