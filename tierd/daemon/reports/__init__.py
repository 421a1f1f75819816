"""What the daemon shows of its runs to pages and terminals, and the files in which it leaves word of itself.

Imported by the rest of `daemon/`, and by the command line.
"""
