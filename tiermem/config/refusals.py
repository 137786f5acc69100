"""Sentences for what a configuration is refused for: the dotted key, what was read, what is allowed."""

import difflib
from collections.abc import Mapping

from pydantic import BaseModel, ValidationError

from tiermem.config.toml import show

Sections = Mapping[str, type[BaseModel]]


def sentences(error: ValidationError, read: Mapping[str, object], sections: Sections) -> list[str]:
    """One sentence for each key of `read` that was refused, in the order in which they were met."""
    found: dict[tuple[str, ...], str] = {}
    for problem in error.errors(include_url=False):
        # Deeper names are a union's branches and a list's items; people know the section and the key.
        key = tuple(str(name) for name in problem["loc"][:2])
        if key in found:
            continue
        if problem["type"] == "extra_forbidden":
            found[key] = _unknown(key, sections)
        elif len(key) == 1:
            keys = ", ".join(sections[key[0]].model_fields)
            found[key] = f"{key[0]}: read {show(read[key[0]])}; allowed is a table of the keys {keys}"
        else:
            reason = problem.get("ctx", {}).get("error")
            found[key] = _bad_value(key, read[key[0]], sections, f", but {reason}" if reason else "")
    return list(found.values())


def _bad_value(key: tuple[str, ...], table: object, sections: Sections, reason: str) -> str:
    section, name = key
    extra = sections[section].model_fields[name].json_schema_extra
    assert isinstance(table, Mapping)
    assert isinstance(extra, dict)
    return f"{section}.{name}: read {show(table[name])}{reason}; allowed is {extra['allowed']}"


def _unknown(key: tuple[str, ...], sections: Sections) -> str:
    *outer, name = key
    near = list(sections[outer[0]].model_fields) if outer else list(sections)
    # A good key in the wrong section, or above all sections, is likelier than a misspelt one.
    meant = [f"{other}.{name}" for other, model in sections.items() if name in model.model_fields]
    if not meant:
        meant = [".".join([*outer, close]) for close in difflib.get_close_matches(name.lower(), near, n=1)]
    hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
    kind = "key" if outer else "section"
    return f"{'.'.join(key)}: there is no such {kind}{hint} (allowed: {', '.join(near)})"
