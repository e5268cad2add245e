"The house rules: who imports whom, notebooks and modules in step, size, what the package needs, and clean outputs"
import ast, io, json, os, re, shutil, subprocess, symtable, sys, tokenize
from pathlib import Path

import pytest

from check_sync import ROOT, sync_problems

PACKAGE, NBS = ROOT / "minisgl_edu", ROOT / "nbs"
NOTEBOOKS = sorted(NBS.glob("*.ipynb"))
ROOF = {"checks", "draw", "experiments"}
ROOF_GUESTS = {"benchmark", "cli"}       # engine modules that may look up at the roof
HAND_WRITTEN = {"__init__", "__main__"}
MAX_CODE_LINES, MAX_FUNCTION, MAX_CELL = 5500, 60, 80

STDLIB = set(sys.stdlib_module_names)
ENGINE_NEEDS = {"torch", "numpy", "transformers", "tokenizers", "huggingface_hub", "tqdm", "safetensors", "minisgl_edu"}
MAY_NEED = {  # what one module may import besides
    "layers": {"numba", "llvmlite"}, "kernels": {"triton"}, "checkpoint": {"gguf"}, "server": {"fastapi", "starlette", "pydantic", "prometheus_client"},
    "launch": {"uvicorn", "fastapi"}, "benchmark": {"httpx", "gguf", "xllamacpp"}, "cli": {"uvicorn", "fastapi", "prompt_toolkit"}, "draw": {"matplotlib", "IPython"}, "experiments": {"triton", "zmq"},
}
DEV_TOOLS = ["nbdev", "fastcore", "execnb", "matplotlib", "IPython", "ipykernel", "jupyterlab", "nbformat", "nbclient", "nbconvert",
             "pytest", "hypothesis", "openai"]
PRODUCT_ONLY = ["fastapi", "starlette", "uvicorn", "prometheus_client", "prompt_toolkit", "gguf"]
NEEDS_PRODUCT = {"server", "launch"}


# --- reading notebooks and modules ------------------------------------------------------------------------------------

def cells(path, kind="code"):
    "Sources of a notebook's cells of one kind, with their outputs"
    nb = json.loads(path.read_text(encoding="utf-8"))
    return [("".join(c["source"]), c.get("outputs", [])) for c in nb["cells"] if c["cell_type"] == kind]


def default_exp(path):
    "The module that a notebook exports to, or None"
    found = [m[1] for s, _ in cells(path) if (m := re.search(r"^#\|\s*default_exp\s+(\S+)", s, re.M))]
    return found[0] if found else None


def number(path): return int(path.name[:2]) if path.name[:2].isdigit() else None


FLOORS = {default_exp(p): number(p) for p in NOTEBOOKS if default_exp(p)}  # module -> number of its notebook
MODULES = sorted(p.stem for p in PACKAGE.glob("*.py") if p.stem not in HAND_WRITTEN and not p.stem.startswith("_"))


def parse(source): return compile(source, "<cell>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def public_face():
    "Names of the public face and their modules, as `__init__.py` states them"
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "_PUBLIC": return ast.literal_eval(node.value)


def modules_imported(tree):
    "Modules of this package that some code imports, wherever in it"
    found, public = set(), public_face()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import): names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level: base = f"minisgl_edu.{base}".rstrip(".")
            names = [f"{base}.{a.name}" for a in node.names] if base == "minisgl_edu" else [base]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            names = [a.value for a in node.args if isinstance(a, ast.Constant)]
        else: continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "minisgl_edu" and len(parts) > 1: found.add(public.get(parts[1], parts[1]))
    return found


def roots_imported(tree, top_only=False):
    "First parts of all absolute imports"
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import): yield from (a.name.split(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level: yield node.module.split(".")[0]


def upward(module, floor, imported):
    "Which of the imported modules are not below"
    return {m for m in imported if m not in ROOF and m != module and not FLOORS.get(m, 99) < floor}


# --- the staircase ----------------------------------------------------------------------------------------------------

def test_reader_of_imports_sees_every_form():
    "The staircase test can fail: each way of importing is seen"
    code = "import minisgl_edu.radix\nfrom minisgl_edu.core import Req\nfrom . import engine\nfrom .text import encode\nfrom minisgl_edu import LLM, draw\nimport_module('minisgl_edu.cli')\ndef f():\n    from minisgl_edu.kernels import k"
    assert modules_imported(ast.parse(code)) == {"radix", "core", "engine", "text", "llm", "draw", "cli", "kernels"}
    assert upward("device", 2, {"core", "device", "draw"}) == set()
    assert upward("core", 1, {"core", "device"}) == {"device"}


def test_one_notebook_per_module():
    "Numbered notebooks, each named after its module, no module twice, none without a notebook"
    named = {p.stem[3:]: default_exp(p) for p in NOTEBOOKS if number(p) is not None}
    assert all(name == module for name, module in named.items()), named
    numbers = [number(p) for p in NOTEBOOKS if number(p)]
    assert len(numbers) == len(set(numbers)), "two chapters have the same number"
    assert set(MODULES) <= set(FLOORS), f"modules without a notebook: {set(MODULES) - set(FLOORS)}"


def test_map_shows_the_notebooks():
    "The engine map and the notebooks agree on names and numbers"
    from minisgl_edu.draw import PARTS
    drawn = {f"{b[:2]}_{b[3:]}" for _, boxes in PARTS for b in boxes}
    assert {p.stem for p in NOTEBOOKS if number(p) is not None} <= drawn


@pytest.mark.parametrize("module", MODULES)
def test_staircase(module):
    "A module imports only modules from lower-numbered notebooks, and never the roof"
    imported = modules_imported(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8")))
    if module in ROOF: return  # the roof looks down on everything
    assert not upward(module, FLOORS[module], imported), f"{module} (chapter {FLOORS[module]}) looks up"
    if module not in ROOF_GUESTS: assert not imported & ROOF, f"{module} imports the roof"


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if number(p)], ids=lambda p: p.stem)
def test_page_looks_down(path):
    "The cells of a page, too, use only chapters that the reader has read; no magics"
    for source, _ in cells(path):
        try: imported = modules_imported(parse(source))
        except SyntaxError as e: pytest.fail(f"not plain Python ({e}):\n{source}")
        assert not upward(default_exp(path), number(path), imported), source
        exported = re.match(r"\s*#\|\s*exporti?\s*$", source, re.M)
        if exported and default_exp(path) not in ROOF_GUESTS: assert not imported & ROOF, f"an exported cell imports the roof:\n{source}"


@pytest.mark.parametrize("module", MODULES)
def test_third_parties(module):
    "A module imports only what the design allows it"
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    foreign = set(roots_imported(tree)) - STDLIB - ENGINE_NEEDS - MAY_NEED.get(module, set())
    assert not foreign, f"{module} may not import {foreign}"
    assert "gguf" not in set(roots_imported(tree, top_only=True)), "gguf is imported only while the default model is converted"


# --- in step, in size -------------------------------------------------------------------------------------------------

def test_notebooks_and_modules_in_step():
    "A fresh export gives the committed modules, and nbdev_clean changes nothing"
    assert sync_problems() == []


def code_lines(source):
    "Lines of code without blanks, comments, docstrings, signatures and the generated `__all__`"
    drop, keep = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}, set()
    for t in tokenize.generate_tokens(io.StringIO(source).readline):
        if t.type not in drop: keep.update(range(t.start[0], t.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__": keep -= set(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)): keep -= set(range(node.lineno, node.body[0].lineno))
        body = getattr(node, "body", None)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)) or not body: continue
        doc = body[0]
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str) and doc.lineno > getattr(node, "lineno", 0):
            keep -= set(range(doc.lineno, doc.end_lineno + 1))
    return len(keep)


def test_code_lines_counts_code():
    "The counter sees code, and nothing else"
    source = '"""Module."""\n__all__ = ["f",\n "g"]\nimport os\n\n# comment\ndef f(\n    a:int, # first\n)->int:\n    "Doc"\n    # why\n    return (a +\n            1)\ndef g(x): return x\nclass C:\n    "Doc"\n    x: int = 0\n'
    assert code_lines(source) == 1 + 2 + 1 + 2  # import, return over two lines, one-line g, class and its field


def test_size(capsys):
    "The engine, chapters 01-25 and 27, stays about 5,000 lines"
    sizes = {m: code_lines((PACKAGE / f"{m}.py").read_text(encoding="utf-8")) for m in MODULES if 1 <= FLOORS.get(m, 99) <= 27 and FLOORS[m] != 26}
    with capsys.disabled():
        print("\nlines of code: " + ", ".join(f"{m} {n}" for m, n in sorted(sizes.items(), key=lambda s: FLOORS[s[0]])) + f"; sum {sum(sizes.values())}")
    assert sum(sizes.values()) <= MAX_CODE_LINES


@pytest.mark.parametrize("module", MODULES)
def test_no_long_function(module):
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno - f.lineno + 1 > MAX_FUNCTION}
    assert not long


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_no_wall_of_code(path):
    long = [s.split("\n")[1] for s, _ in cells(path) if re.match(r"#\|\s*export", s) and len(s.split("\n")) > MAX_CELL]
    assert not long, f"exported cells over {MAX_CELL} lines"


# --- what the package needs -------------------------------------------------------------------------------------------

def run_python(code):
    "Run code in a fresh interpreter that finds this checkout; fails with what it wrote"
    r = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stderr
    return r.stdout


def import_without(modules, blocked):
    "Import modules while other packages cannot be imported"
    names = [f"minisgl_edu.{m}" for m in modules]
    run_python(f"import sys, importlib\nfor b in {blocked!r}: sys.modules[b] = None\nfor m in {names!r}: importlib.import_module(m)")


def test_imports_without_development_tools():
    "Everything but the plots imports where only the requirements are installed"
    import_without([m for m in MODULES if m != "draw"], DEV_TOOLS)


def test_imports_without_the_product():
    "Whoever studies the engine needs no web server"
    import_without([m for m in MODULES if m != "draw" and m not in NEEDS_PRODUCT], DEV_TOOLS + PRODUCT_ONLY)


def test_blocking_blocks():
    "The two tests above can fail"
    with pytest.raises(AssertionError, match="matplotlib"): import_without(["draw"], DEV_TOOLS)


def test_an_installed_package_stands_alone(tmp_path):
    "`pip install .`, and away from the checkout: the parts to study and the page to serve, without nbdev, Jupyter or a GPU"
    pytest.importorskip("setuptools")
    for name in ("settings.ini", "setup.py", "pyproject.toml", "README.md", "LICENSE"): shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(PACKAGE, tmp_path / "minisgl_edu", ignore=shutil.ignore_patterns("__pycache__"))
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--target", str(site), str(tmp_path)]
    done = subprocess.run(pip, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    code = f"""import sys
for name in {DEV_TOOLS!r}: sys.modules[name] = None
sys.path.insert(0, {str(site)!r})
from minisgl_edu.radix import RadixCache
cache = RadixCache(8, 1)
cache.insert([1, 2, 3], [0, 1, 2])
from minisgl_edu import LLM, SamplingParams, start_server
from minisgl_edu.server import demo_page
import minisgl_edu, torch
print(minisgl_edu.__file__, cache.match_prefix([1, 2, 9]).pages, torch.cuda.is_available(), len(demo_page()) > 1000)"""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"CUDA_VISIBLE_DEVICES": ""}
    out = subprocess.run([sys.executable, "-c", code], cwd=site.parent.parent, env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout.split() == [str(site / "minisgl_edu" / "__init__.py"), "[0,", "1]", "False", "True"]
    assert "minisgl-edu = minisgl_edu.cli:main" in next(site.glob("minisgl_edu-*.dist-info/entry_points.txt")).read_text()


def test_imports_are_lazy():
    "A spawned child that needs one module does not pay for the others"
    out = run_python("import sys, minisgl_edu; a = 'torch' in sys.modules\nimport minisgl_edu.core\nprint(a, [m for m in ('transformers', 'triton', 'minisgl_edu.engine') if m in sys.modules])")
    assert out.strip() == "False []"


def test_no_compiler_and_no_algebra_come_along():
    "What nobody needs to run a model on a CPU takes seconds to import: PyTorch's compiler, SymPy, the code of transformers' models"
    heavy = ("torch._dynamo", "sympy", "torch.distributed.tensor", "transformers.modeling_utils")
    out = run_python(f"""import sys
from minisgl_edu import LLM, SamplingParams
with LLM(device="cpu", max_seq_len=64) as llm:
    llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=3))
    print(llm.engine.graphs is not None and llm.engine.graphs.taped, [m for m in {heavy!r} if m in sys.modules])""")
    assert out.splitlines()[-1] == "True []"


def test_public_face():
    "What the README imports is there"
    existing = [n for n, m in public_face().items() if m in MODULES]
    out = run_python(f"import minisgl_edu; print([getattr(minisgl_edu, n).__name__ for n in {existing!r}])")
    assert out.strip() == repr(existing)


# --- the pages --------------------------------------------------------------------------------------------------------

def texts(outputs):
    "All text in a cell's outputs"
    for o in outputs:
        if o["output_type"] == "stream": yield "".join(o["text"])
        for kind, data in o.get("data", {}).items():
            if kind.startswith("text/"): yield "".join(data)


LEAKS = {"a machine path": r"(?<![\w.])/(?:tmp|root|home|work|usr|opt|var)/\w", "a memory address": r"\b0x[0-9a-fA-F]{6,}", "a progress bar": r"\r(?!\n)|it/s[\],]|█|━"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs(path):
    "Committed with outputs, without errors, and with nothing of the machine in them"
    outputs = [o for _, out in cells(path) for o in out]
    if not outputs: pytest.fail("committed without outputs")
    errors = [o["ename"] for o in outputs if o["output_type"] == "error"]
    assert not errors
    found = [(what, m[0]) for text in texts(outputs) for what, pattern in LEAKS.items() if (m := re.search(pattern, text))]
    assert not found


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if number(p) and number(p) != 27], ids=lambda p: p.stem)
def test_has_a_plot(path):
    "Every chapter draws what it measured (the map does not count: it is SVG)"
    kinds = {k for _, out in cells(path) for o in out for k in o.get("data", {})}
    assert "image/png" in kinds
    assert "image/svg+xml" in kinds, "the map of the engine is missing"


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if number(p) is not None], ids=lambda p: p.stem)
def test_opening(path):
    "A chapter opens with its module, its title and one line that says what it buys"
    first = json.loads(path.read_text(encoding="utf-8"))["cells"][:2]
    assert re.match(r"#\| default_exp \w+$", "".join(first[0]["source"]))
    assert first[1]["cell_type"] == "markdown" and re.match(r"# \S.*\n\n> \S", "".join(first[1]["source"]))


def module_names(source):
    "(global names that a cell reads, names that it binds)"
    def below(table): return [table, *(t for child in table.get_children() for t in below(child))]
    top = symtable.symtable(source, "<cell>", "exec")
    reads = {s.get_name() for t in below(top) for s in t.get_symbols() if s.is_referenced() and (t is top or s.is_global())}
    return reads, {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_measuring_cells_stand_alone(path):
    "What nbval runs does not need a name that only a skipped cell defines"
    defined, skipped = set(), set()
    for source, _ in cells(path):
        reads, binds = module_names(source)
        if re.search(r"^# ?NBVAL_SKIP", source, re.M): skipped |= binds - defined; continue
        assert not (bad := (reads - binds - defined) & skipped), f"{bad} is defined in a cell that nbval skips:\n{source}"
        defined |= binds
        skipped -= binds


def test_nbval_copy_marks_what_nbdev_skips():
    "Counts are restored, flagged cells are skipped, prose and other cells stay as they are"
    from check_outputs import prepare, test_flags
    assert {"gpu", "slow"} <= test_flags()
    def cell(source, outputs=()): return dict(cell_type="code", source=source, execution_count=None, outputs=list(outputs))
    nb = dict(cells=[cell("#| eval: false\n1/0"), dict(cell_type="markdown", source="#| slow"), cell("#| slow\n1"), cell("#| export\nx = 1 # slow"),
                     cell("x", [dict(output_type="execute_result", execution_count=None)])])
    out = prepare(nb, {"gpu", "slow"})["cells"]
    assert [c["source"].startswith("# NBVAL_SKIP\n") for c in out] == [True, False, True, False, False]
    assert [c["execution_count"] for c in out if c["cell_type"] == "code"] == [1, 2, 3, 4] and out[4]["outputs"][0]["execution_count"] == 4


def test_measurements_say_where_they_come_from():
    "Every committed measurement carries its provenance"
    for path in (NBS / "measurements").glob("*/*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        for record in data if path.stem == "ladder" else [data]:
            assert record["provenance"]["device"] and record["provenance"]["date"], path
            assert path.stem == "ladder" or record["rows"], path


def test_the_command_says_its_version(capsys):
    from minisgl_edu import __version__
    from minisgl_edu.cli import main
    with pytest.raises(SystemExit) as end: main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out.strip() == f"minisgl_edu {__version__}"
