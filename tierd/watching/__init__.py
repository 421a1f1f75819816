"""Find and check other programs' checkpoints in place: which files form one unit (one checkpoint), whether the unit is
complete, and whether each file's structure is sound.

Invariant: nothing below a watched directory is written, moved, loaded or unpickled, and no symbolic link is followed.
Only `directory_tree`, `named_directory` and functions of `unit` touch a file system.

This package imports `formats` and `core`. `cli`, `daemon` and `exporting` import it.
"""
