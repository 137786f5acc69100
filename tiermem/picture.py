"""A picture of step time against budget, as an SVG that is readable on dark and on light ground."""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 44, 52
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#7a7f87}.t{font-size:15px}.g{stroke:#7a7f87;stroke-opacity:.3}"
    ".l{fill:none;stroke:#2f81d6;stroke-width:2.5}.d{fill:none;stroke:#7a7f87;stroke-width:1.5;stroke-dasharray:5 4}"
    ".m{fill:#e07b1a}.e{text-anchor:end}.c{text-anchor:middle}"
)


def draw(
    title: str,
    simulated: Sequence[tuple[float, float]],
    measured: Sequence[tuple[float, float]] = (),
    computing: float | None = None,
    names: tuple[str, str] = ("host budget, GiB", "seconds a step"),
) -> str:
    """An SVG of (budget, seconds): ``simulated`` as a line, ``measured`` as points, ``computing`` as a dashed floor.

    Raises ValueError without a simulated point.
    """
    if not simulated:
        raise ValueError("there is nothing to draw: no budget of the sweep holds a step")
    points = [*simulated, *measured]
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top = max([y for _, y in points] + [computing or 0.0]) * 1.08 or 1.0
    span = (high - low) or 1.0

    def x(value: float) -> float:
        return LEFT + (value - low) / span * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text class="t" x="{LEFT}" y="22">{escape(title)}</text>',
    ]
    for value in _ticks(0.0, top):
        parts.append(f'<path class="g" d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="e" x="{LEFT - 8}" y="{y(value) + 4:.1f}">{value:g}</text>')
    parts += [
        f'<text class="c" x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 20}">{value:g}</text>'
        for value in _ticks(low, high)
    ]
    parts.append(f'<text class="e" x="{WIDTH - RIGHT}" y="{HEIGHT - 10}">{escape(names[0])}</text>')
    parts.append(f'<text x="8" y="{TOP - 8}">{escape(names[1])}</text>')
    if computing is not None:
        parts.append(f'<path class="d" d="M{LEFT} {y(computing):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT + 6}" y="{y(computing) + 16:.1f}">computing alone</text>')
    line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in sorted(simulated))
    parts.append(f'<polyline class="l" points="{line}"/>')
    for a, b in measured:
        parts.append(f'<circle class="m" cx="{x(a):.1f}" cy="{y(b):.1f}" r="5"/>')
    at = WIDTH - RIGHT - 190
    parts.append(
        f'<path class="l" d="M{at} {TOP - 12}h24"/><text x="{at + 30}" y="{TOP - 8}">simulated</text>'
    )
    if measured:
        parts.append(f'<circle class="m" cx="{at + 116}" cy="{TOP - 12}" r="5"/>')
        parts.append(f'<text x="{at + 126}" y="{TOP - 8}">measured</text>')
    return "\n".join([*parts, "</svg>", ""])


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers within a range, about six."""
    span = (high - low) or abs(high) or 1.0
    step = 10.0 ** floor(log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6.5)
    return [
        round(number * step, 12) for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)
    ]
