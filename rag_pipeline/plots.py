"""Small pictures for reports and asset metadata, as PNG."""

import base64
import io
from collections.abc import Sequence


def token_histogram(token_counts: Sequence[int], *, limit: int) -> bytes:
    """Histogram of chunk sizes in tokens, with the hard limit marked; PNG bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 2.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.hist(list(token_counts), bins=40, range=(0, max([limit, *token_counts])), color="#4f6df5")
    axes.axvline(limit, color="#c0392b", linewidth=1)
    axes.annotate("hard limit", (limit, 0.9), xycoords=("data", "axes fraction"), ha="right", color="#c0392b")
    axes.set_xlabel("tokens of the model's whole input")
    axes.set_ylabel("chunks")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": ""})
    return picture.getvalue()


def inline_image(png: bytes, *, alternative: str) -> str:
    """A PNG as a Markdown image that needs no file."""
    return f"![{alternative}](data:image/png;base64,{base64.b64encode(png).decode()})"
