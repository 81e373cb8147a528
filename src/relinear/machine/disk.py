"""Files that are on the disk, and not in memory alone; folders that can be made and written to; what a disk's
refusal means."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile

from relinear.errors import UserError

AGAIN = "give the same command again"
WORK = ".work"  # the folder below which steps write before they are at their end
# What an error of the operating system asks for, by its number.
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room"),
    errno.EFBIG: (
        "files of this size are not allowed here (`ulimit -f`, or the file system's limit): raise the limit"
    ),
    errno.EMFILE: "more files are open than this user may open (`ulimit -n`): raise the limit",
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "make it writable"),
    **dict.fromkeys(
        (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS),
        "this file system keeps no locks of files (flock), as network file systems without a lock server:"
        " move the clone to a local disk, or have it mounted with locks (NFS 4; Lustre with `flock`)",
    ),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE),
        "the disk or the network file system failed: look at its state (`dmesg`) or take another disk",
    ),
}


def refusal(error: BaseException) -> str | None:
    """What the operating system refused behind an error, and what to do; None for any other error. Libraries
    in Rust name it in words alone."""
    number, where = (error.errno, error.filename) if isinstance(error, OSError) else (None, None)
    if "No space left on device" in str(error):
        number = errno.ENOSPC
    if number == errno.ENOENT and where and WORK in (place := Path(os.fsdecode(where))).parts:
        step = Path(*place.parts[: len(place.parts) - place.parts[::-1].index(WORK) + 1])
        made = step / "out" if step / "out" in place.parents else step
        # in the folders that are made for a step, while they stand, what is missing is another fault
        return None if made.is_dir() else f"{made} was deleted during the work; {AGAIN}"
    if number not in REMEDIES:
        return None
    return f"{os.strerror(number)}: {where or 'the disk of the results'}; {REMEDIES[number]}, then {AGAIN}"


def in_the_way(folder: Path) -> str | None:
    """A sentence about the file, or the link that leads nowhere, which stands where a folder is needed; None
    where nothing does."""
    for path in (folder, *folder.parents):
        if path.is_dir():
            return None
        if path.exists() or path.is_symlink():
            what = "a file" if path.exists() else "a link that leads nowhere"
            return f"{path} is {what}, and a folder is needed there; move it away, then {AGAIN}"
    return None


def require_possible(*folders: Path) -> None:
    """Raise UserError where something other than a folder stands in a folder's place. Makes nothing."""
    for folder in folders:
        if said := in_the_way(folder):
            raise UserError(said)


def make_writable(folders: Iterable[Path]) -> None:
    """Make folders. Raises UserError for one that cannot be made or in which no file can be written."""
    for folder in folders:
        require_possible(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written to: {error.strerror}; make it writable, then {AGAIN}"
            ) from None


def sync(folder: Path, deep: bool = True) -> None:
    """Write a folder, and with `deep` all files in it, from memory to the disk, so that a machine that goes
    down leaves them whole."""
    for path in [*(p for p in folder.rglob("*") if deep), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
