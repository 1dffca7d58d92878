"""The few shapes that the pictures of the docs are made of, written as SVG."""

from __future__ import annotations

from html import escape

PAPER, INK, FAINT, LINE = "#ffffff", "#222222", "#8a8a8a", "#555555"


class Picture:
    """Collects shapes; later ones lie on top. Lengths are pixels."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, line: str = "none"
    ) -> None:
        radius = 0 if line == "none" else 5
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'rx="{radius}" fill="{fill}" stroke="{line}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "middle",
        size: float = 11,
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}" '
            f'fill="{fill}"{weight}>{escape(text)}</text>'
        )

    def line(
        self,
        points: list[tuple[float, float]],
        colour: str,
        width: float = 1.6,
        dashed: bool = False,
    ) -> None:
        """A plain line through the points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"'
            f"{dash}/>"
        )

    def svg(self, width: float, height: float, title: str) -> str:
        """The whole file; the paper is white, so that it can be read on a dark page as well."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" role="img" '
            'font-family="system-ui, sans-serif">'
        )
        paper = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
        parts = [head, f"<title>{escape(title)}</title>", paper, *self._parts, "</svg>", ""]
        return "\n".join(parts)
