"""Files: how they are opened, what they reserve, and their refusals."""

import errno
import os
import stat
from pathlib import Path

import pytest

from tiermem.aio import File


def test_a_new_file_is_private_and_not_inherited(tmp_path: Path) -> None:
    with File(tmp_path / "new", 12345 * 4096, create=True) as file:
        info = os.fstat(file.fd)
        assert stat.S_IMODE(info.st_mode) == 0o600
        assert info.st_size == 12345 * 4096
        assert not os.get_inheritable(file.fd)
        file.sync()


def test_a_file_that_is_there_keeps_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"x" * 10_000)
    with File(path, 4096, create=True):
        pass
    assert path.read_bytes() == b"x" * 10_000


def test_a_missing_file_is_not_made_unasked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        File(tmp_path / "none")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for direct in (True, False):
        with pytest.raises(OSError) as info:
            File(tmp_path / "link", create=True, direct=direct)
        assert info.value.errno == errno.ELOOP


def test_direct_says_its_alignment(tmp_path: Path) -> None:
    with File(tmp_path / "file", create=True) as file:
        if file.direct:
            assert all(size & (size - 1) == 0 for size in file.alignment)
            assert f"offsets to {file.alignment.offset}" in file.note
        else:
            assert file.note.startswith("buffered: ")
            assert file.alignment == (1, 1)


def test_buffered_when_asked(tmp_path: Path) -> None:
    with File(tmp_path / "file", create=True, direct=False) as file:
        assert not file.direct
        assert file.alignment == (1, 1)
        assert file.note == "buffered, as asked"


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)


def test_a_filesystem_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct(monkeypatch)
    with File(tmp_path / "file", create=True) as file:
        assert not file.direct
        assert file.note == "buffered: the filesystem refuses O_DIRECT (Invalid argument)"
    with pytest.raises(OSError, match="insisted on: buffered: the filesystem refuses"):
        File(tmp_path / "file", direct=True)


@pytest.mark.parametrize("nbytes", [0, 100_000])
def test_alignment_is_tried_where_the_kernel_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(nbytes))
    with File(path) as file:
        told = file.alignment
        if not file.direct:
            pytest.skip("the temporary folder's filesystem refuses O_DIRECT")
    monkeypatch.setattr("tiermem.aio.file._told_alignment", lambda fd: None)
    with File(path) as file:
        assert file.direct
        assert "tried" in file.note
        assert file.alignment.offset >= told.offset
        assert file.alignment.offset in ((512, 4096) if nbytes else (4096,))


def test_a_disk_too_small_says_so_and_is_left_alone(tmp_path: Path) -> None:
    asked = 1 << 50
    with File(tmp_path / "file", 4096, create=True) as file:
        with pytest.raises(OSError, match=f"reserving {asked} bytes: [0-9]+ bytes are free") as info:
            file.preallocate(asked)
        assert info.value.errno == errno.ENOSPC
        assert os.fstat(file.fd).st_size == 4096


def failing_fallocate(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_fallocate(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match=r"reserving 8192 bytes: [0-9]+ bytes are free"):
        File(tmp_path / "file", 8192, create=True)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_filesystem_that_can_not_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    failing_fallocate(monkeypatch, code)
    with File(tmp_path / "file", 8192, create=True) as file:
        assert os.fstat(file.fd).st_size == 8192


def test_another_failure_to_reserve_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_fallocate(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="reserving 8192 bytes: Input/output error"):
        File(tmp_path / "file", 8192, create=True)


def test_closed_is_closed(tmp_path: Path) -> None:
    file = File(tmp_path / "file", create=True)
    file.close()
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.sync()
