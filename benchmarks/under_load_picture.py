"""Draws what `under_load.py` measured: how often a wait is longer than so many milliseconds.

    python benchmarks/under_load_picture.py FILE [--report benchmarks/results/under-load.json]

A line for each engine, waits between tokens on the left and for the first token on the right; both
axes are logarithmic, so that the rare long waits are seen. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # files alone: there may be no display
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results" / "under-load.json"
PANELS = {"itl_ms": "between two tokens", "ttft_ms": "for the first token, short prompts"}


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture of a report, in the format that the path's ending names."""
    longer = [1 - quantile for quantile in report["quantiles"]]
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for panel, (name, label) in zip(panels, PANELS.items(), strict=True):
        for engine, summary in report["engines"].items():
            # The longest wait of all, which none exceeds, has no place on a logarithmic axis.
            panel.plot(summary[f"{name}_quantiles"][:-1], longer[:-1], label=engine)
        panel.set(xscale="log", yscale="log", xlabel=f"milliseconds {label}")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("share of waits that are longer")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Draw a report that was written before."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--report", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    draw(json.loads(arguments.report.read_text()), arguments.path)


if __name__ == "__main__":
    main()
