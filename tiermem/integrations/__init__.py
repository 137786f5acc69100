"""Integrations: other people's training loops over paged models. Each module wants its library: see the extras."""
