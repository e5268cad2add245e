"The exercises: a stub says that nobody solved it, the folded solution is right, and a common mistake hears what is wrong"
import ast, importlib, re
from collections import Counter
from functools import lru_cache
from pathlib import Path

import nbformat, pytest

from minisgl_edu import checks

NBS = Path(__file__).resolve().parent.parent / "nbs"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
CALL = re.compile(r"^check_(\w+)\((\w+)\)$", re.M)


def exercises(path):
    "`(check, answer, starter source, solutions)` for each exercise of a notebook: the code cell that ends in `check_x(answer)`, and the fold that follows it"
    cells, found = nbformat.read(path, as_version=4).cells, []
    start = next((i for i, c in enumerate(cells) if c.cell_type == "markdown" and c.source.startswith("## Exercises")), None)
    if start is None: return found
    for i, cell in enumerate(cells[start:], start):
        called = CALL.findall(cell.source)
        if cell.cell_type != "code" or not called: continue
        fold = next((c.source for c in cells[i + 1:i + 2] if c.cell_type == "markdown" and "<details><summary>Solution</summary>\n\n" in c.source), None)
        assert fold and fold.rstrip().endswith("\n\n</details>"), f"{path.name}: {called} has no folded solution in the next cell"
        found.append((*called[-1], cell.source, FENCE.findall(fold)))
    return found


BOOKS = {p.stem: exercises(p) for p in sorted(NBS.glob("[0-9]*.ipynb"))}
ALL = [pytest.param(book, *e, id=f"{book}-{e[0]}") for book, found in BOOKS.items() for e in found]


@lru_cache(maxsize=None)
def page(book):
    "What a reader has at hand at the end of a chapter: its module's names, and the checks"
    return {k: v for k, v in vars(checks).items() if k.startswith("check_")} | vars(importlib.import_module(f"minisgl_edu.{book.split('_', 1)[1]}"))


def run(book, *sources):
    "The names after these cells ran, in order, at the end of a chapter"
    names = {k: v for k, v in page(book).items() if not k.startswith("__")} | {"__name__": "exercise"}
    for n, source in enumerate(sources): exec(compile(source, f"<{book}, cell {n}>", "exec"), names)
    return names


def test_no_two_exercises_share_a_check():
    names = Counter(e[0] for found in BOOKS.values() for e in found)
    assert not [n for n, times in names.items() if times > 1]
    tree = ast.parse(Path(checks.__file__).read_text(encoding="utf-8"))
    functions = Counter(f.name for f in tree.body if isinstance(f, ast.FunctionDef))
    assert not [f for f, times in functions.items() if times > 1], "a later chapter's function of the same name replaces an earlier one's"
    assert set(names) | {"median"} == set(checks.CHECKS), "every check belongs to an exercise, and the other way round"


@pytest.mark.parametrize("book,name,answer,starter,solutions", ALL)
def test_an_untouched_starter_is_not_solved_yet(book, name, answer, starter, solutions, capsys):
    run(book, starter)
    assert capsys.readouterr().out.splitlines()[-1] == f"{name}: not solved yet"


@pytest.mark.parametrize("book,name,answer,starter,solutions", ALL)
def test_the_solution_is_right_and_the_mistakes_are_not(book, name, answer, starter, solutions):
    assert len(solutions) >= 2, "the fold holds the solution, then at least one common mistake"
    verdicts = [checks.solved_or_not(name, run(book, starter, s)[answer]) for s in solutions]
    assert verdicts[0].status == "solved", verdicts[0]
    for v in verdicts[1:]: assert v.status == "wrong" and v.reason, v
