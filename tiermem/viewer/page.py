"""The viewer's page: one HTML file with its style and scripts in it, and the data too where it is to be kept.

The scripts are ES modules in `static/`, so that editors and linters see what is imported from where. A page that is one
file has nothing to import from, so there each module is a function that returns what it exports. The page's content
security policy allows that script and style, by their hashes, and nothing else: no name in a trace can become code.
"""

import base64
import gzip
import hashlib
import json
import os
import re
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from tiermem.trace.errors import TraceError
from tiermem.trace.place import reason, replaceable
from tiermem.viewer.session import Mode, Session, pyramid

SCRIPTS = (
    "format",
    "dom",
    "palette",
    "store",
    "totals",
    "view",
    "lanes",
    "paint",
    "details",
    "timeline",
    "tree",
    "units",
    "stalls",
    "compare",
    "header",
    "main",
)
"""The modules in `static/`, each behind those that it imports."""

STYLES = ("colours", "page", "views")
"""The style sheets, in their order."""

MOST_NBYTES = 48 << 20
"""Bytes of tiles, compressed, that one file may hold; the finest ones are left out first."""

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:const|let|class|function) (\w+))", re.MULTILINE)


@cache
def template() -> tuple[str, str]:
    """The page up to its data and from there on."""
    static = files("tiermem.viewer") / "static"
    script = "".join(_module(name, _read(static, f"{name}.js")) for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\nconst modules = {{}};\n{script}}})();\n'
    style = "".join(_read(static, f"{name}.css") for name in STYLES)
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(script)}'; style-src 'sha256-{_hash(style)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = _read(static, "index.html")
    for mark, content in (("{{policy}}", policy), ("{{style}}", style), ("{{script}}", script)):
        page = page.replace(mark, content)
    before, after = page.split("{{data}}")
    return before, after


def _module(name: str, text: str) -> str:
    """The module ``text`` as a function's body; ``modules`` has those before it."""
    exported = ", ".join(found for _, found in _EXPORT.findall(text))
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = modules.\2;", text))
    return f"modules.{name} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"


def served() -> str:
    """The page that asks its server for the data."""
    before, after = template()
    return before + after


def export(session: Session, path: str | os.PathLike[str]) -> int:
    """Write the page with all of its data to ``path``; returns the bytes written.

    The file appears whole or not at all. Raises `TraceError` where it can't be written.
    """
    where = replaceable(Path(path))
    temporary = ""
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{where.name[:200]}.", suffix=".new", dir=where.parent)
        with os.fdopen(fd, "w", encoding="utf-8") as out:
            before, after = template()
            out.write(before)
            json.dump(_data(session), out, separators=(",", ":"))
            out.write(after)
        os.replace(temporary, where)
        return where.stat().st_size
    except OSError as error:
        raise TraceError(f"can't write {where}: {reason(error)}") from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def _data(session: Session) -> dict[str, Any]:
    """All that the server would answer; everything is packed, so that nothing in it looks like markup."""
    tiles: dict[str, str] = {}
    finest = []
    for number, run in enumerate(session.runs):
        room = MOST_NBYTES // len(session.runs)
        finest.append(0)
        for level, index, tile in pyramid(run):
            packed = _pack(tile)
            room -= len(packed)
            if room < 0:
                finest[number] = level + 1
                break
            tiles[f"{number}/{level}/{index}"] = packed
    document = session.document()
    for run, level in zip(document["runs"], finest, strict=True):
        run["finest"] = level
    return {
        "session": _pack(document),
        "units": [_pack(run.units()) for run in session.runs],
        "comparison": _pack(session.comparison() if session.mode is Mode.COMPARE else None),
        "tiles": tiles,
    }


def _pack(document: Any) -> str:
    text = json.dumps(document, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(text, 6, mtime=0)).decode()


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _read(folder: Any, name: str) -> str:
    text: str = (folder / name).read_text(encoding="utf-8")
    return text
