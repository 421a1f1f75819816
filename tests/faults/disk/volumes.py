"""File systems of one trial's own: filled up to the page, out of inodes, read-only, taken away, and repaired again."""

from __future__ import annotations

import os
from pathlib import Path

from faults import mounts

_PAGE = 4096


class Volume:
    """A file system mounted at `point`; also somewhere else, so that one that is taken away is not lost.

    Args:
        image: of an ext4, that is mounted; without one it is a tmpfs.
        size: of a tmpfs, bytes.
    """

    def __init__(self, point: Path, image: Path | None = None, size: int = 24 << 20) -> None:
        self.point, self._image, self._size = point, image, size
        self.kind = "ext4" if image else "tmpfs"
        self._away = point.with_name(point.name + ".elsewhere")
        self._taken = 0
        point.mkdir()
        self._away.mkdir()
        self._up()

    def _up(self) -> None:
        if self._image:
            mounts.call("mount", "-t", "ext4", "-o", "loop,errors=remount-ro", str(self._image), str(self._away))
        else:
            mounts.mount_memory(self._away, f"size={self._size}")
        self.back()

    def sync(self) -> None:
        """What was put here is not lost by an error of the file system any more."""
        mounts.sync(self._away)

    # -- full ---------------------------------------------------------------------------------------------------------

    def leave_pages(self, pages: int) -> None:
        """Take all room but so many pages. (Of an ext4, a few go into what describes the file that takes it.)"""
        found = os.statvfs(self._away)
        want = found.f_bavail * found.f_frsize - pages * _PAGE
        fd = os.open(self._away / "ballast", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            while want > 0 and self._ballast(fd, want):
                found = os.statvfs(self._away)
                want = found.f_bavail * found.f_frsize - pages * _PAGE
        finally:
            os.close(fd)

    def _ballast(self, fd: int, size: int) -> bool:
        try:
            os.posix_fallocate(fd, os.fstat(fd).st_size, max(size // _PAGE * _PAGE, 1))
        except OSError:
            return False
        return size >= _PAGE

    def leave_inodes(self, count: int) -> None:
        """Take all inodes but so many."""
        (self._away / "many").mkdir(exist_ok=True)
        if not self._image:
            used = os.statvfs(self._away)
            inodes = used.f_files - used.f_ffree + count
            self._remount(f"size={self._size},nr_inodes={inodes}")
            return
        for number in range(os.statvfs(self._away).f_favail - count):
            os.close(os.open(self._away / "many" / str(number), os.O_CREAT | os.O_WRONLY, 0o600))

    def make_room(self) -> None:
        """There is room again."""
        (self._away / "ballast").unlink(missing_ok=True)
        if (self._away / "many").is_dir():
            if not self._image:
                self._remount(f"size={self._size},nr_inodes=100000")
            for path in (self._away / "many").iterdir():
                path.unlink()
            (self._away / "many").rmdir()
        self.sync()  # an error of the file system later on must not bring the ballast back

    # -- read-only ----------------------------------------------------------------------------------------------------

    def turn_read_only(self) -> bool:
        """As an ext4 does by itself when it meets an error, whatever is open; a tmpfs only between two writes. Whether
        it is."""
        if self._image:
            mounts.fail(self._away)
            return True
        try:
            self._remount(f"size={self._size}", mounts.READ_ONLY)
        except OSError:
            return False
        return True

    def mount_anew(self) -> None:
        """Writable again; an ext4 must not be in use any more, for it is unmounted and mounted."""
        if not self._image:
            self._remount(f"size={self._size}")
            return
        self.vanish()
        mounts.unmount(self._away)
        self._up()

    def _remount(self, options: str, flags: int = 0) -> None:
        mounts.mount("tierd-faults", self._away, None, mounts.REMOUNT | flags, options)

    # -- away ---------------------------------------------------------------------------------------------------------

    def vanish(self) -> None:
        """Nothing is mounted here any more; who has files open keeps them."""
        mounts.detach(self.point)

    def below(self) -> list[str]:
        """What lies under the mount point while nothing is mounted there."""
        return os.listdir(self.point)

    def back(self) -> None:
        mounts.mount(self._away, self.point, None, mounts.BIND)
