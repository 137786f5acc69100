"""Corpora: what is read, what is left out, and that windows are the bytes that stand in the files."""

import os

import pytest
import torch

from tiermem.trainer.data import Corpus, DataError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_bytes(b"first file\n")
    (tmp_path / "b" / "c.txt").write_bytes("zweite Datei: ü\n".encode("latin-1"))
    (tmp_path / "b" / "d.py").write_bytes(b"third = 3\n")
    return tmp_path


def whole(corpus):
    return corpus.read(0, len(corpus))


def test_files_stand_in_the_order_of_their_paths(folder):
    corpus = Corpus(folder)
    assert whole(corpus) == b"first file\n" + "zweite Datei: ü\n".encode("latin-1") + b"third = 3\n"
    assert corpus.num_files == 3
    assert corpus.num_skipped == 0


def test_every_window_is_what_stands_there(folder):
    corpus = Corpus(folder)
    text = whole(corpus)
    for start in range(len(text)):
        for stop in range(start, len(text) + 1):
            assert corpus.read(start, stop - start) == text[start:stop]


def test_suffixes_and_excluded_folders(folder):
    assert whole(Corpus(folder, suffixes=(".py",))) == b"third = 3\n"
    assert whole(Corpus(folder, exclude=("b",))) == b"first file\n"


def test_a_single_file_is_bytes_whatever_is_in_it(tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    assert whole(Corpus(tmp_path / "binary")) == bytes(range(256))


def test_binary_hidden_and_empty_files_in_a_folder(folder):
    (folder / "binary").write_bytes(b"text at first" + b"\0" * 9)
    (folder / ".hidden").write_bytes(b"hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_bytes(b"hidden")
    (folder / "empty").touch()
    corpus = Corpus(folder)
    assert corpus.num_files == 3
    assert corpus.num_skipped == 1


def test_links_that_loop_and_links_to_the_same_file(folder):
    (folder / "b" / "up").symlink_to(folder)
    (folder / "b" / "again.txt").symlink_to(folder / "a.txt")
    (folder / "dead").symlink_to(folder / "nowhere")
    os.link(folder / "a.txt", folder / "hard")
    assert len(Corpus(folder)) == 11 + 16 + 10


def test_a_pipe_is_not_opened(folder):
    os.mkfifo(folder / "pipe")
    assert Corpus(folder).num_files == 3
    with pytest.raises(DataError, match="neither a file nor a folder"):
        Corpus(folder / "pipe")


def test_refusals(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        Corpus(tmp_path / "missing")
    with pytest.raises(DataError, match="no text files"):
        Corpus(tmp_path)
    (tmp_path / "binary").write_bytes(b"\0")
    with pytest.raises(DataError, match="1 were binary"):
        Corpus(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="is empty"):
        Corpus(tmp_path / "empty")


def test_batches_are_windows_with_the_next_byte_as_target(folder):
    corpus = Corpus(folder)
    text = whole(corpus)
    batches = corpus.batches(batch=3, sequence=5, seed=1)
    again = corpus.batches(batch=3, sequence=5, seed=1)
    for _ in range(20):
        tokens, targets = next(batches)
        assert tokens.shape == targets.shape == (3, 5)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        for row, last in zip(tokens.tolist(), targets[:, -1].tolist(), strict=True):
            assert bytes([*row, last]) in text
        assert torch.equal(tokens, next(again)[0])


def test_the_shortest_text_that_will_do(tmp_path):
    (tmp_path / "text").write_bytes(b"abcdef")
    corpus = Corpus(tmp_path / "text")
    tokens, targets = next(corpus.batches(batch=2, sequence=5))
    assert tokens.tolist() == [list(b"abcde")] * 2
    assert targets.tolist() == [list(b"bcdef")] * 2
    with pytest.raises(DataError, match="6 B, too little for one sequence of 6 bytes"):
        corpus.batches(batch=2, sequence=6)


def test_files_that_change_while_they_are_read(folder):
    corpus = Corpus(folder)
    (folder / "a.txt").write_bytes(b"short")
    with pytest.raises(DataError, match="became shorter"):
        whole(corpus)
    (folder / "a.txt").unlink()
    with pytest.raises(DataError, match="No such file"):
        whole(corpus)


def test_a_folder_is_not_kept_in_memory(tmp_path, monkeypatch):
    """What is read while it is opened is no more than the beginnings of files."""
    with open(tmp_path / "large.txt", "wb") as file:
        file.write(b"text " * 2000)
        file.truncate(1 << 36)  # a hole: a file of 64 GiB that takes no space
    corpus = Corpus(tmp_path)
    assert len(corpus) == 1 << 36
    tokens, _ = next(corpus.batches(batch=4, sequence=16))
    assert tokens.shape == (4, 16)
