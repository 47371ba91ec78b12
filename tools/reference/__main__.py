"""Writes docs/reference/ and docs/features.md anew: `python -m tools.reference`."""

from __future__ import annotations

from pathlib import Path

from tools.reference.commands import command_page, file_name
from tools.reference.endpoints import endpoints_page
from tools.reference.errors import errors_page
from tools.reference.features import features_page
from tools.reference.markdown import item, page, wrapped
from tools.reference.metrics import metrics_page
from tools.reference.parsers import commands

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
FEATURES = FOLDER.parent / "features.md"
_ABOUT = (
    "All of this is generated from the code. The [other documents](../README.md) explain it. Every "
    "command has `--help` and `--version`."
)
_OTHERS = (
    ("Metrics", "metrics.md", "names, labels and buckets"),
    ("HTTP endpoints", "http.md", "bodies, responses and statuses"),
    ("Errors and exit codes", "errors.md", "on the wire, in Python, over HTTP, of commands"),
    ("Sampling parameters", "../client.md#sampling-parameters", "defaults and ranges"),
    ("Messages of the wire", "../../PROTOCOL.md", "fields and their types"),
)


def pages() -> dict[str, str]:
    """name: text of each file in the folder."""
    found = commands()
    texts = {file_name(name): command_page(name, parser) for name, (parser, _) in found.items()}
    texts["metrics.md"] = metrics_page()
    texts["http.md"] = endpoints_page()
    texts["errors.md"] = errors_page()
    lines = [item(f"[{name}]({file_name(name)}): {text}.") for name, (_, text) in found.items()]
    others = [item(f"[{title}]({file}): {text}.") for title, file, text in _OTHERS]
    parts = ("## Commands and their flags", "\n".join(lines), "## Others", "\n".join(others))
    texts["README.md"] = page("Reference", wrapped(_ABOUT), *parts)
    return texts


def main() -> None:
    """Write them, and remove what is no longer one of them."""
    FOLDER.mkdir(exist_ok=True)
    texts = pages()
    for path in FOLDER.glob("*.md"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, "utf-8")
    FEATURES.write_text(features_page(), "utf-8")


if __name__ == "__main__":
    main()
