"""Small pictures for reports and asset metadata, as PNG."""

import base64
import io
from collections.abc import Sequence


def token_histogram(token_counts: Sequence[int], *, soft: int, hard: int) -> bytes:
    """Histogram of chunk sizes in tokens, with the soft target and the hard limit marked; PNG bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 2.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.hist(list(token_counts), bins=40, range=(0, max([hard, *token_counts])), color="#4f6df5")
    for size, name, color in ((soft, "soft target ", "#777777"), (hard, "hard limit ", "#c0392b")):
        axes.axvline(size, color=color, linewidth=1)
        axes.annotate(name, (size, 1), xycoords=("data", "axes fraction"), ha="right", va="top", color=color)
    axes.set_xlabel("tokens of the model's whole input")
    axes.set_ylabel("chunks")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": ""})
    return picture.getvalue()


def inline_image(png: bytes, *, alternative: str) -> str:
    """A PNG as a Markdown image that needs no file."""
    return f"![{alternative}](data:image/png;base64,{base64.b64encode(png).decode()})"
