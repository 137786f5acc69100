"""The errors: families, numbers, messages."""

import errno
import pickle

import pytest

from tiermem.errors import (
    BudgetError,
    ConfigError,
    PagingError,
    TiermemError,
    TransferError,
    format_bytes,
)

ERRORS = [
    ConfigError("one", "two", source="policy.toml"),
    BudgetError(3 * 2**29, 2**29, "host", 2**31, "unit blocks.3", "2 pages of 768.00 MiB"),
    TransferError("page 3 (parameter of blocks.1)", "host", "disk", "/d/p.3", errno.ENOSPC, "request 2 of 8"),
    TransferError("page 3", "disk", "host", detail="read 512 of 4096 bytes"),
    PagingError("used after close"),
]


@pytest.mark.parametrize(
    ("error", "family"),
    list(zip(ERRORS, [ValueError, MemoryError, OSError, OSError, RuntimeError], strict=True)),
)
def test_errors_are_of_two_families(error: TiermemError, family: type[Exception]) -> None:
    assert isinstance(error, TiermemError)
    assert isinstance(error, family)


@pytest.mark.parametrize("error", ERRORS)
def test_errors_survive_pickling(error: TiermemError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


def test_a_budget_error_has_the_arithmetic() -> None:
    assert str(ERRORS[1]) == (
        "host: asked 1.50 GiB (1,610,612,736 bytes) for unit blocks.3, had 512.00 MiB (536,870,912 bytes); "
        "2 pages of 768.00 MiB; the smallest host budget that would do is 2.00 GiB (2,147,483,648 bytes)"
    )
    assert str(BudgetError(5, 0, "device")) == "device: asked 5 B, had 0 B"


def test_a_transfer_error_names_page_path_and_reason() -> None:
    error = ERRORS[2]
    assert isinstance(error, TransferError)
    assert (error.errno, error.filename, error.path) == (errno.ENOSPC, "/d/p.3", "/d/p.3")
    assert (error.source, error.destination) == ("host", "disk")
    assert str(error) == (
        "page 3 (parameter of blocks.1): host to disk failed (/d/p.3): "
        "[Errno 28] No space left on device; request 2 of 8"
    )
    assert str(ERRORS[3]) == "page 3: disk to host failed: read 512 of 4096 bytes"


def test_a_config_error_lists_its_problems() -> None:
    assert str(ERRORS[0]) == "policy.toml: 2 problems\n  - one\n  - two"
    assert str(ConfigError("one")) == "one"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**30 - 1, "1.00 GiB"),
        (-(2**20), "-1.00 MiB"),
        (2**62, "4096.00 PiB"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text
