"""One checkpoint of another program, as found in a listing."""

from __future__ import annotations

from dataclasses import dataclass

from tierd.watching.programs import UnitLayout

WITHOUT_STEP = "*"  # in the place of a name, the path of all that has no step in one directory


@dataclass(frozen=True, slots=True)
class Unit:
    """One checkpoint of a program, as found in a listing.

    Attributes:
        layout: the layout of its program.
        path: the directory or file, from the listing's directory; for several files, the prefix of their names, or the
            first of them; for all files and directories without a step that lie in one directory, `<directory>/*`.
        step: the step in its name; None if the name has none.
        files: its regular files, as sorted paths from the listing's directory.
        strange: its links and special files, in the same form.
        missing: the reason why it is not complete; None if the listing shows it complete.
        markers: the files that its program writes last, also outside of its directory. If there is no such file, all of
            its files.
        begun: whether the program itself left the proof that it began the save and did not finish it.
    """

    layout: UnitLayout
    path: str
    step: int | None
    files: tuple[str, ...]
    strange: tuple[str, ...]
    missing: str | None
    markers: tuple[str, ...]
    begun: bool = False

    @property
    def is_directory(self) -> bool:
        """Whether `path` is a directory of the unit."""
        return not self.files or any(file.startswith(f"{self.path}/") for file in (*self.files, *self.strange))
