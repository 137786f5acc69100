"""Values as a TOML file writes them: the standard library reads TOML, and nothing in it writes it."""

import enum
import json
import os
from collections.abc import Mapping

from tiermem.config.size import Size


def encode(value: object) -> str:
    """`value` on one line of TOML; a size, tier or path as the string that is read back as it.

    Raises TypeError for what TOML has no way to write.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are a part of TOML's, but for the character that only TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, enum.Enum):
        return encode(value.value)
    if isinstance(value, Size):
        return encode(str(value))
    if isinstance(value, os.PathLike):
        return encode(os.fspath(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(encode(each) for each in value)}]"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{encode(str(key))} = {encode(value[key])}" for key in value)
        return f"{{{pairs}}}"
    raise TypeError(f"TOML can't hold a {type(value).__name__}")


def show(value: object) -> str:
    """`value` for a message: as TOML where that can hold it, on one line of at most 80 characters."""
    try:
        text = encode(value)
    except TypeError:
        text = repr(value)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."
