"Run nbval over prepared copies of the notebooks: every unmarked cell's text output is compared with the stored one"
import argparse, json, os, re, shutil, subprocess, sys, tempfile, time
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_flags():
    "Flags of cells that run only when asked for, from settings.ini"
    parser = ConfigParser(delimiters=["="])
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return set(parser["DEFAULT"]["tst_flags"].split())


def directives(source):
    "The nbdev directives of a cell: `#| eval: false` -> {'eval:': ['false']}"
    lines = re.findall(r"^\s*#\s*\|\s*(\S+)[ \t]*(.*)$", source, re.M)
    return {name: rest.split() for name, rest in lines}


def is_skipped(source, flags):
    "Would `nbdev_test` leave this cell out?"
    found = directives(source)
    return "false" in [v.lower() for v in found.get("eval:", [])] or bool(flags & set(found))


def prepare(notebook, flags):
    "A copy for nbval: counts where nbdev_clean took them away, and NBVAL_SKIP where nbdev skips"
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code": continue
        source, count = "".join(cell["source"]), count + 1
        cell["execution_count"] = count
        for output in cell["outputs"]:
            if output["output_type"] == "execute_result": output["execution_count"] = count
        if is_skipped(source, flags): cell["source"] = "# NBVAL_SKIP\n" + source
    return notebook


def copy_notebooks(names, folder):
    "Prepared copies in `folder`, with the measurements beside them; returns the copies' paths"
    if (ROOT / "nbs" / "measurements").is_dir(): shutil.copytree(ROOT / "nbs" / "measurements", folder / "measurements", dirs_exist_ok=True)
    flags, paths = test_flags(), []
    for path in sorted((ROOT / "nbs").glob("*.ipynb")):
        if names and path.stem not in names: continue
        notebook = prepare(json.loads(path.read_text(encoding="utf-8")), flags)
        paths.append(folder / path.name)
        paths[-1].write_text(json.dumps(notebook), encoding="utf-8")
    return paths


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("names", nargs="*", help="notebooks, without .ipynb; all if left out")
    p.add_argument("--timeout", type=float, default=300, help="seconds for one cell")
    p.add_argument("--workers", type=int, default=1, help="notebooks at the same time")
    args = p.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "nbs"
        folder.mkdir()
        paths = copy_notebooks(args.names, folder)
        if not paths: raise SystemExit("no such notebook")
        env = {**os.environ, "MINISGL_QUICK": "1", "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        workers = str(args.workers) if args.workers > 1 else "0"
        code = subprocess.run([sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", os.devnull,
                               "-n", workers, "--dist", "loadfile", "--nbval", "--nbval-current-env", f"--nbval-cell-timeout={args.timeout:g}", "--durations=5", *map(str, paths)],
                              env=env, cwd=folder).returncode
    print(f"outputs of {len(paths)} notebooks compared in {time.monotonic() - start:.0f} s")
    return code


if __name__ == "__main__": raise SystemExit(main())
