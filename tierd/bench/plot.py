"""The result as a picture.

Invariant: only this module imports matplotlib, and its absence is one sentence.
"""

from __future__ import annotations

from pathlib import Path

from tierd.bench.result import Result

_FIGURES = {"blocked_s": "blocked", "added_s": "added to training", "durable_s": "until durable"}
_MIN_DRAWN_S = 1e-4  # seconds; an added time below it, or below zero, is drawn there


def draw(result: Result, path: Path) -> str | None:
    """Write a PNG with one panel for each size, medians of each arm. Return the reason if there is none, else None."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: matplotlib is not installed; pip install 'tierd[bench]'"
    sizes = result.sizes
    figure = Figure(figsize=(5 * len(sizes) + 2, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for size, panel in zip(sizes, panels, strict=True):
        names = [name for name in size.measured if name != "none"][::-1]
        for place, (figure_name, label) in enumerate(_FIGURES.items()):
            values = [max(_MIN_DRAWN_S, size.arms[name].median(figure_name) or 0.0) for name in names]
            panel.barh([index + 0.25 * (1 - place) for index in range(len(names))], values, 0.25, label=label)
        for name, style in (("memcpy_s", ":"), ("raw_overwrite_s", "--")):
            ceiling = size.ceiling(name)
            if ceiling is not None:
                panel.axvline(ceiling, color="black", linewidth=0.8, linestyle=style, label=name.removesuffix("_s"))
        panel.set_yticks(range(len(names)), names)
        panel.set_xscale("log")
        panel.set_xlabel("seconds, median")
        panel.set_title(f"{size.gigabytes:g} GB, steps of {size.step_s:.2f} s")
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=110)
    return None
