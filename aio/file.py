"""Files for page-sized I/O that bypasses the page cache where the filesystem lets it.

A File knows how its filesystem wants direct I/O aligned, and says why when it has to do without.
"""

import ctypes
import errno
import mmap
import os
from types import TracebackType
from typing import Final, Literal, NamedTuple

_STATX_DIOALIGN: Final = 0x2000  # Linux 6.1
_AT_EMPTY_PATH: Final = 0x1000
_REFUSED: Final = (errno.EINVAL, errno.EOPNOTSUPP)


class Alignment(NamedTuple):
    """What addresses (memory) and offsets and lengths (offset) must be multiples of, in bytes."""

    memory: int
    offset: int


class _Statx(ctypes.Structure):
    """The kernel's struct statx (linux/stat.h): the fields read here, at their places in its 256 bytes."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("_before", ctypes.c_uint8 * 148),
        ("dio_memory", ctypes.c_uint32),
        ("dio_offset", ctypes.c_uint32),
        ("_after", ctypes.c_uint8 * 96),
    )


def _told_alignment(fd: int) -> Alignment | None:
    """What statx says, (0, 0) for "no direct I/O here"; None from a kernel or filesystem that doesn't say."""
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except AttributeError:  # a C library older than glibc 2.28
        return None
    answer = _Statx()
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(answer)) != 0:
        return None
    if not answer.mask & _STATX_DIOALIGN:
        return None
    return Alignment(answer.dio_memory, answer.dio_offset)


def _tried_alignment(fd: int) -> Alignment | None:
    """The smaller of 512 and 4096 that reads go through with; None where both are refused."""
    if os.fstat(fd).st_size < 512:
        return Alignment(4096, 4096)  # nothing to try on, and 4096 serves wherever 512 would
    with mmap.mmap(-1, 3 * 4096) as memory, memoryview(memory) as view:
        for size in (512, 4096):
            with view[size : 2 * size] as target:
                try:
                    os.preadv(fd, [target], 0)
                except OSError as error:
                    if error.errno not in _REFUSED:
                        raise
                else:
                    return Alignment(size, size)
    return None


class File:
    """An open file for a Queue, read and write, closed on exec, never a symbolic link.

    Args:
        path: the file's path.
        nbytes: space to reserve, see `preallocate`.
        create: make the file (mode 0600) if it isn't there; one that is keeps its bytes.
        direct: "auto" takes O_DIRECT where it is to be had, True insists on it, False does without.

    Raises OSError when the file can't be opened or, with direct=True, refuses O_DIRECT.

    Attributes:
        direct: whether I/O bypasses the page cache.
        alignment: what the Queue's requests must be multiples of; (1, 1) when not direct.
        note: in plain words, why the last two are as they are.

    Close it after its transfers have landed: the kernel may give its descriptor to another file at once.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        nbytes: int | None = None,
        create: bool = False,
        direct: bool | Literal["auto"] = "auto",
    ) -> None:
        self.path = os.fspath(path)
        self._flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        self._fd = -1
        self.direct = False
        self.alignment = Alignment(1, 1)
        self.note = "buffered, as asked"
        if direct is not False:
            self._open_direct()
        if direct is True and not self.direct:
            raise OSError(errno.EINVAL, f"O_DIRECT was insisted on: {self.note}", self.path)
        if self._fd < 0:
            self._fd = os.open(self.path, self._flags, 0o600)
        if nbytes is not None:
            try:
                self.preallocate(nbytes)
            except BaseException:
                self.close()
                raise

    def _open_direct(self) -> None:
        """Opens the file with O_DIRECT, or leaves it closed with a note that says why not."""
        try:
            self._fd = os.open(self.path, self._flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self.note = f"buffered: the filesystem refuses O_DIRECT ({os.strerror(error.errno)})"
            return
        source = "statx"
        try:
            alignment = _told_alignment(self._fd)
            if alignment is None:
                source = "tried"
                alignment = _tried_alignment(self._fd)
        except BaseException:
            self.close()
            raise
        if alignment is None or 0 in alignment:
            self.close()
            self.note = "buffered: the filesystem takes O_DIRECT but no aligned read"
            return
        self.direct = True
        self.alignment = alignment
        self.note = f"direct: memory aligned to {alignment.memory}, offsets to {alignment.offset} ({source})"

    @property
    def fd(self) -> int:
        """The descriptor. Raises ValueError once closed."""
        if self._fd < 0:
            raise ValueError(f"{self.path} is closed")
        return self._fd

    def check(self, offset: int, address: int, nbytes: int) -> None:
        """Raises ValueError, with the numbers, for a transfer that this file can't take."""
        if offset < 0 or nbytes <= 0 or address <= 0:
            raise ValueError(
                f"{self.path}: a transfer needs offset >= 0, nbytes > 0 and an address: "
                f"offset {offset}, nbytes {nbytes}, address {address:#x}"
            )
        memory, step = self.alignment
        if offset % step or nbytes % step or address % memory:
            raise ValueError(
                f"{self.path} is direct: offset {offset} and nbytes {nbytes} must be multiples of {step}, "
                f"address {address:#x} of {memory}"
            )

    def preallocate(self, nbytes: int) -> None:
        """Reserves disk space for the first `nbytes` and makes the file at least that long.

        Raises OSError (ENOSPC) with the bytes asked and free, before any are taken where that can be known.
        Where the filesystem can't reserve, the length is set and space is found as it is written.
        """
        before = os.fstat(self.fd)
        missing = nbytes - before.st_blocks * 512
        if missing > self._free_nbytes():
            raise self._no_space(nbytes)
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                os.ftruncate(self.fd, before.st_size)  # some of it may have been taken
                raise self._no_space(nbytes) from error
            # EINVAL: the C library, having no fallocate here, tried to write bytes through O_DIRECT.
            if nbytes <= 0 or error.errno not in (*_REFUSED, errno.ENOSYS):
                text = f"reserving {nbytes} bytes: {error.strerror}"
                raise OSError(error.errno, text, self.path) from error
            if before.st_size < nbytes:
                os.ftruncate(self.fd, nbytes)

    def _free_nbytes(self) -> int:
        room = os.fstatvfs(self.fd)
        return room.f_bavail * room.f_frsize

    def _no_space(self, nbytes: int) -> OSError:
        text = f"reserving {nbytes} bytes: {self._free_nbytes()} bytes are free on this filesystem"
        return OSError(errno.ENOSPC, text, self.path)

    def sync(self) -> None:
        """Returns when what was written would survive a loss of power (fdatasync). Raises OSError."""
        os.fdatasync(self.fd)

    def close(self) -> None:
        """Closes the descriptor. Once is enough, more do no harm."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> "File":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
