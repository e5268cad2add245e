"""JupyterLab in a real browser, as a reader has it: open the index, restart and run all of three chapters, see the plots;
and what a notebook has started stops when its kernel does."""
import base64, json, os, re, shutil, signal, socket, subprocess, sys, threading, time, urllib.error, urllib.request
from pathlib import Path

import pytest

from test_demo import browser, browser_only
from test_launch import descendants, model  # a tiny model with a real tokenizer

NBS = Path(__file__).resolve().parent.parent / "nbs"
CHAPTERS = ["00_checks", "01_core", "21_messages"]  # cheap ones, the last with processes of its own
STARTS = '''
import os
from minisgl_edu import start_server
server = start_server(model=MODEL, port=0, num_pages=64)
print("workers", *server.pids.values())
'''


@pytest.fixture(scope="module")
def lab(tmp_path_factory, model, model_dir):
    "JupyterLab on a copy of the book, small counts; (address, folder, process)"
    folder = tmp_path_factory.mktemp("lab") / "nbs"
    shutil.copytree(NBS, folder, ignore=shutil.ignore_patterns(".*"))
    code = {"cell_type": "code", "execution_count": None, "id": "start", "metadata": {}, "outputs": [], "source": STARTS.replace("MODEL", repr(model))}
    kernel = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
    (folder / "starts.ipynb").write_text(json.dumps({"cells": [code], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    env = {**os.environ, "MINISGL_QUICK": "1", "PYTHONPATH": str(NBS.parent), "JUPYTER_CONFIG_DIR": str(folder.parent / "config"), "JUPYTER_DATA_DIR": str(folder.parent / "data"),
           "JUPYTERLAB_SETTINGS_DIR": str(folder.parent / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(folder.parent / "workspaces")}
    subprocess.run([sys.executable, "-m", "jupyter", "trust", "index.ipynb"], cwd=folder, env=env, check=True, capture_output=True)  # as `make lab` does
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1", "--IdentityProvider.token=t",
               "--ZMQChannelsWebsocketConnection.kernel_ws_protocol=",  # the plain protocol: on a busy machine a restarted kernel's socket can come back without the other one, and the server reads gigabytes into it
               "--ServerApp.port_retries=0", "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        assert process.poll() is None, "JupyterLab does not start"
        try: urllib.request.urlopen(f"{url}/api?token=t", timeout=5); break
        except OSError: time.sleep(0.2)
    yield url, folder, process
    os.killpg(process.pid, signal.SIGTERM)
    try: process.wait(20)
    except subprocess.TimeoutExpired: os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def page(browser, lab):
    context = browser.new_context(viewport={"width": 1300, "height": 1000})
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.on("dialog", lambda dialog: dialog.accept())  # a page with unsaved cells may be left
    yield page
    context.close()


def open_notebook(page, lab, name):
    "Open a notebook in a fresh workspace; wait for its kernel"
    url, _, _ = lab
    page.goto(f"{url}/lab/workspaces/{name}/tree/{name}.ipynb?token=t&reset")
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")


def menu(page, name, label):
    "Choose an entry of the menu bar"
    page.click(f".lm-MenuBar-itemLabel:text-is('{name}')")
    page.click(f".lm-Menu-itemLabel:has-text('{label}')")


def seen(page):
    "What the page shows of a run: the kernel's state, the cells' prompts, open dialogs"
    return (page.locator(".jp-Notebook-ExecutionIndicator").first.get_attribute("data-status"),
            page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").all_text_contents(), page.locator(".jp-Dialog").all_text_contents())


def wait_for(page, holds, seconds):
    "Look at the page twice a second until `holds` of what it shows; whether it came to that"
    end = time.monotonic() + seconds
    while not holds(*seen(page)):
        if time.monotonic() > end: return False
        page.wait_for_timeout(500)
    return True


def run_all(page, folder, name, seconds=240):
    """Restart the kernel, run all cells, save once; the saved notebook's code cells.

    A reader whose cells do not start loads the page again: on a busy machine JupyterLab's server can take the restarted kernel's
    connection for one of its older protocol, and then what the page sends is lost (it tries to unpack gigabytes and gives up)."""
    path = folder / f"{name}.ipynb"
    for _ in range(4):
        menu(page, "Kernel", "Restart Kernel and Run All Cells")
        page.click(".jp-Dialog .jp-mod-accept")
        if wait_for(page, lambda _, prompts, __: any(p.strip("[]: ").isdigit() for p in prompts), 60): break
        page.goto(page.url)
        page.wait_for_selector(".jp-Notebook .jp-Cell")
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")
    else: raise AssertionError(f"{name} does not start; kernel, prompts, dialogs: {seen(page)}")
    ended = wait_for(page, lambda status, prompts, _: status == "idle" and not any("*" in p for p in prompts), seconds)
    assert ended, f"{name} is not done after {seconds} s; kernel, prompts, dialogs: {seen(page)}"
    before = path.stat().st_mtime_ns
    page.keyboard.press("Control+s")
    for _ in range(120):
        try:
            if path.stat().st_mtime_ns != before: return [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
        except json.JSONDecodeError: pass  # half saved
        page.wait_for_timeout(500)
    raise AssertionError(f"{name} is not saved; kernel, prompts, dialogs: {seen(page)}")


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_lab_prints_the_address_of_the_index(tmp_path):
    "Where no browser opens by itself, the printed address must lead to the book, not to an empty launcher"
    (tmp_path / "ready").touch()  # this test's interpreter stands for the environment
    root, env = NBS.parent, {**os.environ, **{f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}}
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    command = ["make", "lab", f"BIN={os.path.relpath(Path(sys.executable).parent, root)}", f"READY={tmp_path / 'ready'}",
               f"ARGS=--no-browser --port={port} --ip=127.0.0.1 --IdentityProvider.token="]
    process = subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    watchdog = threading.Timer(120, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        said, address = [], None
        while address is None and (line := process.stdout.readline()):
            said.append(line)
            address = re.search(r"http://127\.0\.0\.1:\d+/\S*", line)
        assert address and re.search(r":\d+/lab/tree/index\.ipynb$", address[0]), "".join(said)
        for _ in range(100):  # it listens a moment later
            try: assert urllib.request.urlopen(address[0], timeout=60).status == 200; break
            except urllib.error.URLError: time.sleep(0.2)
        else: raise AssertionError(f"nobody answers at {address[0]}")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate()
        watchdog.cancel()


@browser_only
def test_the_book_opens_at_the_index(page, lab):
    open_notebook(page, lab, "index")
    assert page.locator(".jp-Notebook h1").first.text_content().startswith("minisgl_edu")
    page.wait_for_selector(".jp-Notebook .jp-RenderedSVG img")   # the map of the engine
    page.click(".jp-Notebook a:has-text('For instructors')")
    page.wait_for_selector("h1:has-text('For instructors')")


@browser_only
@pytest.mark.parametrize("name", CHAPTERS)
def test_restart_and_run_all(page, lab, name):
    open_notebook(page, lab, name)
    before = [c for c in json.loads((NBS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    cells = run_all(page, lab[1], name)
    assert not [(c["source"], o["evalue"]) for c in cells for o in c["outputs"] if o["output_type"] == "error"]
    def pictures(cells): return sum("image/png" in o.get("data", {}) or "image/svg+xml" in o.get("data", {}) for c in cells for o in c["outputs"])
    assert pictures(cells) == pictures(before)
    if pictures(cells):
        first = next(o["data"]["image/png"] for c in cells for o in c["outputs"] if "image/png" in o.get("data", {}))
        assert base64.b64decode(first)[:4] == b"\x89PNG"
        page.wait_for_selector(".jp-RenderedImage img, .jp-RenderedSVG img", state="attached")
    numbered = [c["execution_count"] for c in cells if "".join(c["source"]).strip()]
    assert numbered == sorted(numbered) and numbered[0] == 1


@browser_only
def test_what_a_notebook_started_stops_with_its_kernel(page, lab):
    "The reader shuts the kernel down: the server's processes must not stay"
    url, folder, process = lab
    open_notebook(page, lab, "starts")
    cells = run_all(page, folder, "starts")
    words = "".join(cells[0]["outputs"][-1].get("text", "")).split()
    workers = set(map(int, words[words.index("workers") + 1:]))
    assert workers and workers <= descendants(process.pid)
    menu(page, "Kernel", "Shut Down Kernel")
    for _ in range(150):
        if not workers & descendants(process.pid) and not any(Path(f"/proc/{p}").exists() for p in workers): break
        time.sleep(0.2)
    else: raise AssertionError(f"still there 30 s after the kernel's end: {sorted(p for p in workers if Path(f'/proc/{p}').exists())}")
