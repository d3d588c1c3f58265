"""How the repository becomes a site: README is its start page, the benchmark report a page, and every linked file a page.

README, docs and the report link to files of the repository as GitHub resolves them. Here each link is turned into one within the
site, so the same text works in both places, and a link to a file that does not exist fails the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
# Pages that lie outside of docs/, by their place in the repository.
PAGES = {"README.md": "index.md", "benchmarks/REPORT.md": "benchmarks/REPORT.md"}
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".jsonl": "json"}


def site_uri(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    return path if path.endswith(".png") else f"source/{path}.md"


def linked_from(origin: str, target: str) -> str:
    """The repository path of a link's target."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    if not (ROOT / path).exists():
        raise PluginError(f"{origin} links to {target}, and the repository has no {path}.")
    return path


def on_files(files, config):
    """Add the pages outside of docs/, and what they and docs/ link to."""
    origins = {path: (ROOT / path).read_text() for path in PAGES}
    for path, text in origins.items():
        files.append(File.generated(config, PAGES[path], content=text))
    origins |= {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages() if not file.generated_by}
    linked = {linked_from(origin, target) for origin, text in origins.items() for target in _LINK.findall(text)}
    linked |= {str(file.relative_to(ROOT)) for path in linked if (ROOT / path).is_dir() for file in (ROOT / path).glob("*.*")}
    for path in sorted(linked):
        uri = site_uri(path)
        if uri.startswith("source/"):
            files.append(File.generated(config, uri, content=source_page(path)))
        elif not files.get_file_from_path(uri):
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def source_page(path: str) -> str:
    """A file as a block of code, a folder as a list of its files; neither is searched."""
    file = ROOT / path
    header = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if file.is_dir():
        return header + "\n".join(f"- [{child.name}]({file.name}/{child.name}.md)" for child in sorted(file.glob("*.*")))
    return f"{header}````{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n````\n"


def on_page_markdown(markdown, page, config, files):
    """Links between files of the repository become links within the site."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    origin = next((path for path, place in PAGES.items() if place == uri), f"docs/{uri}")
    folder = posixpath.dirname(uri)
    return _LINK.sub(lambda link: posixpath.relpath(site_uri(linked_from(origin, link[1])), folder or "."), markdown)
