"""Write docs/api.md from the signatures and docstrings of all public names: `python docs/generate_api.py`."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "api.md"
MODULES = {
    "streamgrad": "The model, its head, and what a step will cost.",
    "streamgrad.objectives": "Losses as functions of token log-probabilities; no trainer is needed.",
    "streamgrad.trl": 'TRL\'s trainers, streamed (`pip install ".[trl]"`). [Trainers](trainers.md) has the details.',
    "streamgrad.parallel": "What an engine still needs to be told. [More than one GPU](distributed.md) has the details.",
}
_WIDTH = 100


def page() -> str:
    parts = [
        "# API",
        "Written by [docs/generate_api.py](generate_api.py) from the code. Names that are not here are internal.",
        "```python\nimport streamgrad\n```",
    ]
    for name, text in MODULES.items():
        module = importlib.import_module(name)
        parts += [f"## {name}", text]
        for public in module.__all__:
            own = getattr(module, public)
            parts += [f"### {public}", f"```py\n{signature(public, own)}\n```"]
            docstring = inspect.getdoc(own) or ""
            if not docstring.startswith(f"{public}("):  # which a dataclass without one gets
                parts.append(as_markdown(docstring))
    return "\n\n".join(parts) + "\n"


def signature(name: str, own: Any) -> str:
    """One line where it fits, else one parameter a line."""
    found = inspect.signature(own)
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    shown = []
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(each.startswith("*") for each in shown):
            shown.append("*")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        shown.append(f"{stars.get(parameter.kind, '')}{parameter.name}: {parameter.annotation}{default}")
    returns = "" if isinstance(own, type) or found.return_annotation is found.empty else f" -> {found.return_annotation}"
    line = f"{name}({', '.join(shown)}){returns}"
    return line if len(line) <= _WIDTH else f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){returns}"


def as_markdown(docstring: str) -> str:
    """The docstring, with the entries of its `Args:` as a list; indented equations are code in Markdown as well."""
    docstring = re.sub(r"\[(`[\w.]+`)\]", r"\1", docstring)  # names that Hugging Face's documentation would link
    before, found, rest = docstring.partition("Args:\n")
    if not found:
        return docstring
    lines = rest.split("\n")
    end = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    entries: list[str] = []
    for line in lines[:end]:
        entry = re.match(r"    (\*?\w[\w*, ]*?)((?: \(.*\))?): ?(.*)$", line)
        if entry:
            entries.append(f"- `{entry[1]}`{entry[2]}: {entry[3]}".rstrip())
        elif line.strip():
            entries.append(f"  {line.strip()}")
    return before + "\n".join(entries) + ("\n\n" + "\n".join(lines[end:]) if lines[end:] else "")


if __name__ == "__main__":
    PAGE.write_text(page())
