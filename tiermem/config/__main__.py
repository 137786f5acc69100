"""Prints the documentation of the policy file in Markdown; `docs/policy.md` is what it printed."""

from tiermem.config.documentation import document

if __name__ == "__main__":
    print(document(), end="")
