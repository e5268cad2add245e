"""The book as web pages: `python nbs/html/build.py OUT` renders every notebook, with links to the page before and the page after.

nbconvert does the work; the template in `nbs/html/book` adds the navigation and makes it fit a phone."""
import argparse, re, shutil
from html import escape
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter

HERE = Path(__file__).resolve().parent
NBS = HERE.parent


def reading_order():
    "Stems of all notebooks: index, chapters, then what one looks things up in"
    stems = sorted(p.stem for p in NBS.glob("*.ipynb"))
    chapters = [s for s in stems if s[0].isdigit()]
    return ["index", *chapters, *(s for s in stems if s not in chapters and s != "index")]


def prose(notebook): return "\n\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")


def for_readers(notebook):
    "The same notebook without what only machines read: plumbing cells, and marks for the test runner"
    hidden = re.compile(r"#\|\s*(default_exp|hide)\b")
    notebook.cells = [c for c in notebook.cells if c.cell_type != "code" or not hidden.match(c.source)]
    for c in notebook.cells:
        if c.cell_type == "code": c.source = re.sub(r"^# ?NBVAL_\w+\n", "", c.source, flags=re.M)
    return notebook


def pictures(notebook):
    "What to call each picture, for those who hear the page: it stands in a section"
    section = ""
    for c in notebook.cells:
        if c.cell_type == "markdown": section = ([section] + re.findall(r"^#+ (.+)$", c.source, re.M))[-1]
        for output in c.get("outputs", ()):
            if any(kind.startswith("image/") for kind in output.get("data", {})): yield f"Picture in the section {section}; the text says what it shows"


def build(out, stems):
    "Write one page for each notebook"
    exporter = HTMLExporter(template_name="book", extra_template_basedirs=[str(HERE)], exclude_input_prompt=True, exclude_output_prompt=True)
    books = {s: for_readers(nbformat.read(NBS / f"{s}.ipynb", as_version=4)) for s in stems}
    titles = {s: re.search(r"^# (.+)$", prose(nb), re.M)[1].replace("`", "") for s, nb in books.items()}
    pages = [(s, escape(titles[s])) for s in stems]
    out.mkdir(parents=True, exist_ok=True)
    shutil.copytree(NBS / "images", out / "images", dirs_exist_ok=True)  # nbconvert's `embed_images` would tear folds apart
    for i, stem in enumerate(stems):
        nb = books[stem]
        nb.metadata["title"] = titles[stem]
        book = dict(pages=pages, previous=pages[i - 1] if i else None, next=pages[i + 1] if i + 1 < len(pages) else None,
                    math="$" in re.sub(r"```.*?```|`[^`]*`", "", prose(nb), flags=re.S), mermaid="```mermaid" in prose(nb))
        page, _ = exporter.from_notebook_node(nb, {"metadata": {"name": stem, "path": str(NBS)}, "book": book})
        names = pictures(nb)
        page = re.sub(r'alt="No description has been provided for this image"', lambda m: f'alt="{escape(next(names))}"', page)
        page = re.sub(r'href="(\w+)\.ipynb(#[^"]*)?"', lambda m: f'href="{m[1]}.html{m[2] or ""}"', page)
        (out / f"{stem}.html").write_text(page, encoding="utf-8")


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("out", type=Path, help="folder for the pages")
    p.add_argument("stems", nargs="*", help="notebooks, without .ipynb; all if left out")
    args = p.parse_args()
    stems = [s for s in reading_order() if not args.stems or s in args.stems]
    if missing := set(args.stems) - set(stems): p.error(f"no such notebook: {', '.join(sorted(missing))}")
    build(args.out, stems)
    print(f"{len(stems)} pages; open {args.out / stems[0]}.html")


if __name__ == "__main__": main()
