"""How figures look, once as PNG on white and once as SVG that follows the page's colours, light or dark."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wire.errors import PacelineError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Palette:
    """Colours of one figure."""

    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]

    def css(self) -> str:
        """As variables of a style sheet."""
        series = {f"series-{number}": value for number, value in enumerate(self.series, 1)}
        values = {"ink": self.ink, "muted": self.muted, "grid": self.grid} | series
        return " ".join(f"--{name}: {value};" for name, value in values.items())


ON_WHITE = Palette("#1b1f24", "#57606a", "#d8dee4", ("#0072b2", "#d55e00", "#00805c", "#a34a83", "#8a6a00", "#3f4c5a"))
ON_BLACK = Palette("#e6edf3", "#9aa7b4", "#323a44", ("#56b4e9", "#ff8b4a", "#2fc79b", "#e39cc3", "#f0d442", "#b8c4d0"))
"""That of Okabe and Ito, which people who are colour-blind can tell apart, darkened for white and lightened for black."""
NAMES = Palette("#010101", "#010102", "#010103", ("#010111", "#010112", "#010113", "#010114", "#010115", "#010116"))
"""Stand-ins that `as_svg` replaces by the page's variables."""

DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 3)), (0, (8, 2)))
"""So that lines are told apart without their colours."""

_PNG_DPI = 160
_SVG_SIZE = re.compile(r' (?:width|height)="[^"]*pt"')
_SVG_FONT = re.compile(r"'DejaVu Sans'[^;\"]*")


class MissingMatplotlib(PacelineError):
    """Figures need the package."""

    code = "missing_matplotlib"


def require_matplotlib() -> None:
    """Before any work is done in vain; raises MissingMatplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingMatplotlib(
            "reports are drawn with matplotlib, which is not installed; install it with `pip install 'paceline[bench]'`"
        ) from error


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure."""
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text: a page with six figures is small, can be searched, and uses the reader's font. Nor is a name a formula.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "paceline", "font.size": 9.5, "text.parse_math": False})
    return Figure(figsize=(width_in, height_in), layout="constrained")


def dress(axes: Axes, palette: Palette, title: str, *, x: str = "", y: str = "") -> None:
    """Title on the left, units on the axes, nothing else that is not data."""
    axes.set_title(title, loc="left", color=palette.ink, fontweight="bold", fontsize=10)
    axes.set_xlabel(x, color=palette.muted)
    axes.set_ylabel(y, color=palette.muted)
    axes.tick_params(which="both", colors=palette.muted, labelcolor=palette.muted, length=3, width=0.6)
    axes.grid(color=palette.grid, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(palette.grid)


def legend(axes: Axes, palette: Palette, *, columns: int = 4) -> None:
    """Above the axes on the right; only where there is something to tell apart."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(
            handles, labels, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=columns, frameon=False,
            labelcolor=palette.ink, fontsize=8.5, handlelength=2.2, columnspacing=1.2, borderaxespad=0.1,
        )  # fmt: skip


def as_png(figure: Figure) -> bytes:
    """On white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_PNG_DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def as_svg(figure: Figure, label: str) -> str:
    """Without a background, for a page that has the variables of `Palette.css`; `label` is read to those who cannot see."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for name, variable in _variables().items():
        text = text.replace(name, variable)
    head, _, rest = text.partition(">")
    head = _SVG_SIZE.sub("", head)
    return f'{head} role="img" aria-label="{label}">{_SVG_FONT.sub("system-ui, sans-serif", rest)}'


def _variables() -> dict[str, str]:
    series = {name: f"var(--series-{number})" for number, name in enumerate(NAMES.series, 1)}
    return {NAMES.ink: "var(--ink)", NAMES.muted: "var(--muted)", NAMES.grid: "var(--grid)"} | series
