"""The documentation of the policy file, generated from the models that read it."""

from pydantic.fields import FieldInfo

from tiermem.config import section_models, toml

_HEAD = """\
# The policy file

`TieredModule(net, "policy.toml")` reads this file; a dict of the same shape, or a `tiermem.Config`, does as
well. Every key is optional. What is unknown, not allowed or contradictory is refused, all of it at once, with
the file, the key, what was read and what is allowed.

Sizes are written `"512MiB"` or `"1.5 GiB"` (powers of 1024), `"20GB"` (powers of 1000), as a number of bytes,
or, for budgets, as a percentage such as `"80%"` of what is free when the model is wrapped.

This page is generated: `python -m tiermem.config > docs/policy.md`.

The whole file, with the default of every key; a key without one stands after `#`:

"""


def document() -> str:
    """The whole page, in Markdown."""
    return _HEAD + f"```toml\n{_defaults()}```\n" + "".join(_section(name) for name in section_models())


def _defaults() -> str:
    tables = []
    for name, model in section_models().items():
        lines = [f"[{name}]"]
        for key, field in model.model_fields.items():
            if field.default is None:
                lines.append(f"# {key} = {toml.encode(_examples(field)[0])}")
            else:
                lines.append(f"{key} = {toml.encode(field.default)}")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def _section(name: str) -> str:
    model = section_models()[name]
    assert model.__doc__ is not None
    keys = "".join(_key(f"{name}.{key}", field) for key, field in model.model_fields.items())
    return f"\n## [{name}]\n\n{' '.join(model.__doc__.split())}\n{keys}"


def _key(dotted: str, field: FieldInfo) -> str:
    assert isinstance(field.json_schema_extra, dict)
    default = "none" if field.default is None else f"`{toml.encode(field.default)}`"
    key = dotted.split(".")[1]
    examples = ", ".join(f"`{key} = {toml.encode(example)}`" for example in _examples(field))
    return (
        f"\n### {dotted}\n\n{field.description}\n\n"
        f"- Allowed: {field.json_schema_extra['allowed']}\n"
        f"- Default: {default}\n"
        f"- Examples: {examples}\n"
    )


def _examples(field: FieldInfo) -> list[object]:
    assert field.examples
    return field.examples
