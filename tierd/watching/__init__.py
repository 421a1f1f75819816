"""Find and check other programs' checkpoints in place.

This package determines which files form one unit (one checkpoint), whether the unit is complete, and whether each
file's structure is sound.

- `listing`: names, sizes and times of all files below a directory, as data.
- `programs`: the table of known programs, with the source that was read for each.
- `layouts`: the units in a listing; pure.
- `inspect`: checks a unit's files with `formats`, and against each other; reads only through its `Opener`.
- `settle`: the units that are ready to be taken, from successive listings; pure.
- `describe`: a unit's step, metrics and number of ranks, from its files.
- `naming`: the checkpoint that a unit becomes; pure.
- `beside`: a unit among the other units of its listing; pure.
- `unit_file`: the description of a unit inside its part.
- `pointers`: the files by which programs find their newest checkpoint; pure.
- `files`: the only module that touches a file system; it never writes.

Invariant: nothing below a watched directory is written, moved, loaded or unpickled, and no symbolic link is followed.

This package imports `formats` and `core`. `cli` and `daemon` may import it.
"""
