"""Find and check other programs' checkpoints in place.

This package determines which files form one unit (one checkpoint), whether the unit is complete, and whether each
file's structure is sound.

- `unit`: a listing (names, sizes and times of all files below a directory, as data), the table of known programs, and
  one checkpoint of them.
- `unit_detection`: the units in a listing; with `directory_layouts`, `loose_units`, `completeness`, `series_comparison`
  and `step_in_name`; pure.
- `unit_inspection`: checks a unit's files with `formats`, and against each other; reads only through its `Opener`.
- `settling_units`: the units that are ready to be taken, from successive listings; pure.
- `unit_description`: a unit's step, metrics and number of ranks, from its files; and a listing in words.
- `checkpoint_names`: the checkpoint that a unit becomes, and a unit among the others of its listing; pure.
- `unit_file`: the description of a unit inside its part, and the files by which programs find their newest; pure.
- `directory_tree` and `named_directory`: they touch the file system, and never write.

Invariant: nothing below a watched directory is written, moved, loaded or unpickled, and no symbolic link is followed.

This package imports `formats` and `core`. `cli`, `daemon` and `exporting` import it.
"""
