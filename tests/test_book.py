"The pages around the chapters: index, glossary, instructor's page and the static edition agree with the notebooks"
import ast, json, re
from pathlib import Path

import pytest

NBS = Path(__file__).resolve().parent.parent / "nbs"
CHAPTERS = sorted(p for p in NBS.glob("[0-9]*.ipynb"))
PAGES = [NBS / f"{name}.ipynb" for name in ("index", "glossary", "instructors")]


def markdown(path): return "\n\n".join("".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "markdown")
def everything(path): return "\n\n".join("".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"])
def links(text): return re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)


@pytest.mark.parametrize("path", PAGES + CHAPTERS, ids=lambda p: p.stem)
def test_links_between_pages_lead_somewhere(path):
    local = [link for link in links(markdown(path)) if not re.match(r"https?:|attachment:", link)]
    assert not [link for link in local if not (path.parent / link).exists()]


GLOSSARY = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \| \[(\d\d) (\w+)\]\((\w+)\.ipynb\) \|$", markdown(NBS / "glossary.ipynb"), re.M)


def plain(term): return term.replace("`", "").lower()


def test_the_glossary_is_in_order_and_says_each_word_once():
    assert len(GLOSSARY) == sum(line.startswith("| **") for line in markdown(NBS / "glossary.ipynb").splitlines()) > 100
    terms = [re.sub(r"[^a-z0-9 -]", "", plain(t).replace("_", " ")) for t, *_ in GLOSSARY]
    assert terms == sorted(set(terms))


@pytest.mark.parametrize("term,meaning,number,name,link", GLOSSARY, ids=[plain(t) for t, *_ in GLOSSARY])
def test_a_term_is_in_the_chapter_that_it_links_to(term, meaning, number, name, link):
    assert link == f"{number}_{name}" and (NBS / f"{link}.ipynb").exists()
    text = everything(NBS / f"{link}.ipynb").lower()
    for word in term.split(", "):
        assert re.search(rf"\b{re.escape(plain(word))}", text), f"{link} never says {word!r}"


def test_the_glossary_has_the_words_of_the_field():
    "Those that every chapter spells in the same way"
    have = {plain(w) for t, *_ in GLOSSARY for w in t.split(", ")}
    assert {"prefill", "decode", "cached_len", "device_len", "extend_len", "page", "page_size", "page table", "slot", "out_loc", "prefix cache",
            "match_prefix", "evict", "token budget", "chunked prefill", "overlap", "ttft", "tpot", "itl", "throughput"} <= have


def test_every_bold_word_of_the_chapters_is_in_the_glossary():
    "A term is bold where it is introduced; questions, sentences and labels that end in a mark are not terms"
    words = {plain(w) for t, *_ in GLOSSARY for w in t.split(", ")}
    emphasis = {"small operations", "moves over", "anonymous", "what is recorded"}  # not words of the book
    missing = set()
    for path in CHAPTERS:
        text = re.sub(r"<details>.*?</details>", "", markdown(path).split("\n## Exercises")[0], flags=re.S)
        for bold in re.findall(r"\*\*([^*]+?)\*\*", text):
            term = plain(bold)
            if bold[-1] in ".?:!," or len(term.split()) > 3 or term in emphasis: continue
            if not any(w.startswith(term) or term.startswith(w) for w in words): missing.add(f"{path.stem}: {bold}")
    assert not missing


# ---- index and instructor's page

def test_the_index_says_what_each_chapter_stands_on():
    "Its column is what the modules import"
    from test_project import FLOORS, PACKAGE, default_exp, modules_imported
    rows = dict(re.findall(r"^\|[^|]*\| \[\d\d \w+\]\((\d\d_\w+)\.ipynb\) \|[^|]*\|[^|]*\| ([^|]+) \| \d+ \|$", markdown(NBS / "index.ipynb"), re.M))
    assert set(rows) == {p.stem for p in CHAPTERS if not p.stem.startswith("00")}
    for stem, told in rows.items():
        spans = [part.split("-") for part in told.replace(" ", "").split(",") if part != "–"]
        imported = modules_imported(ast.parse((PACKAGE / f"{default_exp(NBS / f'{stem}.ipynb')}.py").read_text(encoding="utf-8")))
        assert {n for s in spans for n in range(int(s[0]), int(s[-1]) + 1)} == {FLOORS[m] for m in imported if FLOORS.get(m)}, stem


def test_the_index_leads_everywhere():
    assert {p.name for p in CHAPTERS + PAGES} - {"index.ipynb"} <= set(links(markdown(NBS / "index.ipynb")))


def test_the_instructors_table_finds_every_exercise():
    "The page's own reader of exercises sees what the tests' does"
    import test_exercises
    cell = next(s for c in json.loads((NBS / "instructors.ipynb").read_text(encoding="utf-8"))["cells"] if "def exercises(path)" in (s := "".join(c["source"])))
    names = {}
    exec(cell.split("book = ")[0], names)
    for path in CHAPTERS:
        theirs = [(name, answer) for _, _, name, answer in names["exercises"](path) if name]
        assert theirs == [e[:2] for e in test_exercises.BOOKS[path.stem]], path.stem


def test_the_readme_tells_the_recorded_speeds():
    "Its table is that of the measurement file, and its links lead somewhere"
    from minisgl_edu.draw import speed_table
    readme = (NBS.parent / "README.md").read_text(encoding="utf-8")
    record = json.loads((NBS / "measurements" / "cpu" / "benchmark.json").read_text(encoding="utf-8"))
    wanted = [line for line in speed_table(record).data.splitlines() if line.startswith("|")][2:]
    assert len(wanted) >= 3 and not [line for line in wanted if line not in readme.splitlines()]
    assert not [link for link in links(readme) if not link.startswith("http") and not (NBS.parent / link).exists()]


# ---- the static edition

@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "Three pages of `make html`, in the middle of the book a chapter with pictures"
    import subprocess, sys
    out = tmp_path_factory.mktemp("site")
    stems = ["index", "00_checks", "10_radix"]
    done = subprocess.run([sys.executable, str(NBS / "html" / "build.py"), str(out), *stems], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {stem: (out / f"{stem}.html") for stem in stems}


def test_pages_are_chained_and_every_link_leads_to_a_page(site):
    pages = {stem: path.read_text(encoding="utf-8") for stem, path in site.items()}
    def chained(rel, html): return re.findall(rf'<a href="(\w+)\.html" rel="{rel}"', html)
    assert [set(chained("next", html)) for html in pages.values()] == [{"00_checks"}, {"10_radix"}, set()]
    assert [set(chained("prev", html)) for html in pages.values()] == [set(), {"index"}, {"00_checks"}]
    assert len(re.findall(r'alt="Picture in the section [^"]+; the text says what it shows"', pages["10_radix"])) > 2
    for stem, html in pages.items():
        assert "No description has been provided" not in html
        assert 'href="index.html"' in html and "<h1" in html and 'name="viewport"' in html
        for link, anchor in re.findall(r'href="(?!https?:|data:)([^"#]*)(#[^"]*)?"', html):
            assert not link or link.endswith(".html") and (NBS / f"{link[:-5]}.ipynb").exists(), f"{stem} links to {link}"
            if anchor and not link: assert f'id="{anchor[1:]}"' in html, f"{stem} has no {anchor}"


def test_pages_need_nothing_from_elsewhere(site):
    "Formulas and diagrams apart, which say so in the template; pictures are inside, folds hold highlighted code"
    page = site["00_checks"].read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|import)[=(]\s*"https?:', page)
    radix = site["10_radix"].read_text(encoding="utf-8")
    assert 'src="data:image/png' in radix
    for name, html in site.items():
        for picture in re.findall(r'<img[^>]+src="(?!data:)([^"]+)"', html.read_text(encoding="utf-8")): assert (html.parent / picture).exists(), (name, picture)
    fold = re.search(r"<details><summary>Solution</summary>(.*?)</details>", page, re.S)
    assert fold and 'class="highlight' in fold[1]
    assert "default_exp" not in page and "NBVAL" not in page
