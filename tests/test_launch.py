"Starting and ending: the port first, the worker's own reason, signals, kills; and never a process left behind"
import asyncio, gc, json, multiprocessing, os, shutil, signal, socket, subprocess, sys, tempfile, threading, time
from pathlib import Path

import httpx
import pytest

import slow_attention
from minisgl_edu.checkpoint import save_random_model
from minisgl_edu.launch import ServerConfig, ServerHandle, bind, serve, start_server

ROOT = str(Path(__file__).parent.parent)
OPTIONS = dict(port=0, max_running_requests=8, num_pages=512)


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_config, tokenizer):
    "A random model of one small layer, with the default model's tokenizer"
    config = {**tiny_config, "vocab_size": len(tokenizer), "num_hidden_layers": 1, "max_position_embeddings": 4096}
    return str(save_random_model(tmp_path_factory.mktemp("served")/"tiny", config, tokenizer=tokenizer))


# --- helpers ---

def processes()->dict[int, int]: # pid -> parent
    found = {}
    for p in Path("/proc").glob("[0-9]*/stat"):
        try: text = p.read_text()
        except OSError: continue
        pid, rest = int(text.split(" ", 1)[0]), text.rsplit(")", 1)[1].split()
        if rest[0] != "Z": found[pid] = int(rest[1])
    return found


def descendants(pid:int)->set[int]:
    parents, found = processes(), set()
    while new := {p for p, parent in parents.items() if parent in found | {pid}} - found: found |= new
    return found


def children()->set[int]:
    "Ours, without the resource tracker that multiprocessing keeps"
    from multiprocessing.resource_tracker import _resource_tracker
    return {p for p in descendants(os.getpid()) if p != _resource_tracker._pid}


def open_files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Served:
    "`serve` in a process of its own"
    def __init__(self, model, **options):
        code = f"import sys; sys.path[:0] = {[ROOT, str(Path(__file__).parent)]!r}\n" \
               "from minisgl_edu.launch import ServerConfig, serve\nimport slow_attention\n" \
               f"sys.exit(serve(ServerConfig(model={model!r}, attention_backend=slow_attention.Slow, **{ {**OPTIONS, **options}!r})))"
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def ready(self):
        line = self.process.stdout.readline()
        assert "http://" in line, line + self.process.stderr.read()
        self.url = line.split(" at ")[1].split()[0]
        self.all = descendants(self.process.pid) | {self.process.pid}
        return self

    def worker(self, name):
        "Pid of a worker, from the names in the spawn command lines' order: scheduler, tokenizer, detokenizer"
        workers = sorted(p for p in descendants(self.process.pid) if "spawn_main" in Path(f"/proc/{p}/cmdline").read_text())
        return workers[("scheduler", "tokenizer", "detokenizer").index(name)]

    def ended(self, within):
        code = self.process.wait(within)
        wait_for(lambda: not self.all & processes().keys(), 25, "processes left behind")
        with socket.socket() as s: s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(("127.0.0.1", int(self.url.rsplit(":", 1)[1])))
        return code, self.process.stderr.read()

    def __enter__(self): return self
    def __exit__(self, *exc):
        if self.process.poll() is None: os.killpg(self.process.pid, signal.SIGKILL); self.process.wait()
        self.process.stdout.close(); self.process.stderr.close()


class Reader(threading.Thread):
    "One streamed answer, read in the background; `lines` grows"
    def __init__(self, url, tokens):
        super().__init__(daemon=True)
        self.url, self.tokens, self.lines, self.error = url, tokens, [], None
        self.start()

    def run(self):
        body = {"prompt": "Once upon a time", "max_tokens": self.tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as r:
                for line in r.iter_lines():
                    if line: self.lines.append(line)
        except httpx.HTTPError as e: self.error = e

    def started(self): wait_for(lambda: len(self.lines) >= 3 or not self.is_alive(), 60, "no stream"); assert len(self.lines) >= 3, (self.lines, self.error); return self
    def finished(self, within): self.join(within); assert not self.is_alive(), "the stream goes on"; return self
    @property
    def done(self): return "data: [DONE]" in self.lines


def complete(url, **body): return httpx.post(f"{url}/v1/completions", json={"prompt": "Hi", "max_tokens": 3, "temperature": 0, **body}, timeout=60)


# --- configuration ---

@pytest.mark.parametrize("options, word", [
    (dict(port=70000), "port"), (dict(num_tokenizers=0), "num_tokenizers"), (dict(drain_seconds=-1), "drain_seconds"), (dict(start_timeout=0), "start_timeout"),
    (dict(drain_seconds=1e10), "drain_seconds must be >= 0 and <= 1000000"), (dict(start_timeout=1e10), "start_timeout"), (dict(watchdog_seconds=1e8), "watchdog_seconds"),
    (dict(tp=0), "tp"), (dict(watchdog_seconds=0.9), "watchdog_seconds.*one layer"), (dict(watchdog_seconds=float("nan")), "watchdog_seconds"), (dict(page_size=0), "page_size"), (dict(cache="lru"), "lru")])
def test_bad_values_are_refused_by_name(options, word):
    with pytest.raises(ValueError, match=word): start_server(**options)


def test_a_supervisor_that_fails_ends_the_server(model, monkeypatch):
    "Nobody may wait for a server that nobody watches"
    def watch(self, *args): raise OverflowError("a time too large")
    monkeypatch.setattr("minisgl_edu.launch.Workers.watch", watch)
    server = start_server(model=model, port=0, num_pages=64)
    assert server.done.wait(60) and "a time too large" in server.failure
    assert not any(Path(f"/proc/{p}").exists() for p in server.pids.values())


def test_half_a_message_of_a_killed_worker_stops_nobody(model, monkeypatch):
    "The detokenizer dies while a reply lies half in the pipe, the HTTP process about to read it: its clients are told, and the server ends"
    import array, fcntl, termios
    with start_server(model=model, port=0, num_pages=4000, page_size=3, max_seq_len=400) as server:
        deliver, answers = server.frontend.deliver, []
        monkeypatch.setattr(server.frontend, "deliver", lambda msgs: (time.sleep(0.3), deliver(msgs))[1])  # a busy HTTP process
        def client():
            body = dict(prompt="hello", max_tokens=300, n=32, logprobs=20, ignore_eos=True)
            answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))
        clients = [threading.Thread(target=client) for _ in range(4)]
        for c in clients: c.start()
        waiting, end = array.array("i", [0]), time.monotonic() + 60
        while waiting[0] < 60_000 and time.monotonic() < end:  # of the 65,536 that fit
            fcntl.ioctl(server.workers.to_frontend.fileno(), termios.FIONREAD, waiting)
            time.sleep(0.001)
        os.kill(server.pids["detokenizer"], signal.SIGKILL)
        assert server.done.wait(30) and "detokenizer died" in server.failure
        for c in clients: c.join(30)
        assert [a.status_code for a in answers] == [503] * 4 and "detokenizer died" in answers[0].text


def test_unknown_options_are_refused_by_name():
    with pytest.raises(TypeError, match="num_tokenisers"): start_server(num_tokenisers=2)


def test_a_config_is_changed_by_options_and_gives_its_engine_part():
    config = ServerConfig(page_size=4, port=0)
    assert config.engine_config().page_size == 4 and not hasattr(config.engine_config(), "port")


def made_in_a_cell(*args): ...
made_in_a_cell.__module__, made_in_a_cell.__qualname__ = "__main__", "made_in_a_cell"


@pytest.mark.parametrize("value", [lambda *a: None, made_in_a_cell], ids=["lambda", "cell"])
def test_a_function_from_a_cell_is_refused_by_name_at_once(value, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "made_in_a_cell", made_in_a_cell, raising=False)
    with pytest.raises(ValueError, match="attention_backend.*module"): start_server(model="/nowhere", attention_backend=value, port=0)
    assert not multiprocessing.active_children()


# --- start-up failures ---

def test_a_taken_port_is_reported_before_anything_is_loaded(capfd):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0)); s.listen()
        port = s.getsockname()[1]
        with pytest.raises(OSError, match=str(port)): start_server(model="/nowhere", port=port)
        assert not multiprocessing.active_children()
    with pytest.raises(OSError, match="no.such.host"): bind("no.such.host.invalid", 0)


def test_a_directory_without_tokenizer_or_model_is_refused_at_once(tiny_model_dir, tmp_path):
    port = free_port()
    for path in (tiny_model_dir, tmp_path, tmp_path/"nowhere"):
        with pytest.raises((OSError, ValueError), match="tokenizer" if path is tiny_model_dir else str(path)): start_server(model=str(path), port=port)
    bind("127.0.0.1", port).close()
    assert not multiprocessing.active_children()


def test_a_worker_that_cannot_start_says_why_and_nobody_stays(model, tmp_path):
    broken = tmp_path/"broken"
    shutil.copytree(model, broken)
    (broken/"model.safetensors").write_bytes(b"not a safetensors file")
    for options, word in ((dict(model=str(broken)), "model.safetensors"), (dict(model=model, attention_backend=slow_attention.Broken), "never starts")):
        with pytest.raises(RuntimeError, match=f"scheduler.*{word}"): start_server(**{**OPTIONS, **options})
        assert not multiprocessing.active_children() and not children()


def test_a_timeout_names_who_is_missing(model):
    with pytest.raises(TimeoutError, match="scheduler, tokenizer-0, detokenizer"): start_server(model=model, start_timeout=0.01, **OPTIONS)
    assert not children()


def test_serve_prints_the_reason_and_returns_one(capsys):
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try: assert serve(ServerConfig(model="/nowhere", port=0)) == 1
    finally:
        for s, h in handlers.items(): signal.signal(s, h)
    err = capsys.readouterr().err
    assert "error: " in err and "/nowhere" in err and "Traceback" not in err


UNGUARDED = "import sys; sys.path.insert(0, {root!r})\nfrom minisgl_edu import start_server\nserver = start_server(model={model!r}, port=0)\nprint('never')\n"


def test_a_script_without_the_main_guard_gets_a_clear_error(model, tmp_path):
    script = tmp_path/"unguarded.py"
    script.write_text(UNGUARDED.format(root=ROOT, model=model))
    p = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=90)
    assert p.returncode == 1 and "never" not in p.stdout
    assert 'if __name__ == "__main__"' in p.stderr.strip().splitlines()[-1]
    assert p.stderr.count("Traceback") == 1, p.stderr


# --- life ---

def test_start_use_stop_start_again_inside_a_running_event_loop(model):
    async def cells():
        server = start_server(model=model, **OPTIONS)
        url, port = server.url, server.port
        assert complete(url).status_code == 200                        # a plain client
        async with httpx.AsyncClient(timeout=60) as c:                  # and one with await
            assert (await c.get(f"{url}/health")).json()["model"] == "tiny"
            r = await c.post(f"{url}/v1/completions", json={"prompt": "Hi", "max_tokens": 5, "ignore_eos": True})
        assert r.json()["usage"]["completion_tokens"] == 5
        idle_scheduler(server)
        server.stop(); server.stop()
        assert not multiprocessing.active_children() and not children() and server.failure is None
        bind("127.0.0.1", port).close()
        fds = open_files()
        with start_server(server.config, port=port, served_model_name="again", num_tokenizers=2) as second:
            assert set(second.pids) == {"scheduler", "tokenizer-0", "tokenizer-1", "detokenizer"}
            answers = await asyncio.gather(*(asyncio.to_thread(complete, second.url, model="again") for _ in range(6)))
            assert {a.status_code for a in answers} == {200} and len({a.json()["choices"][0]["text"] for a in answers}) == 1
        del second
        assert not children() and open_files() <= fds, "a server leaves no descriptor open"
    asyncio.run(cells())


def idle_scheduler(server):
    "An idle scheduler is blocked, not spinning: no processor time passes"
    def ticks(): return sum(map(int, Path(f"/proc/{server.pids['scheduler']}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
    refused = complete(server.url, prompt="x " * 9000)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    time.sleep(0.5)
    before = ticks()
    time.sleep(0.5)
    assert ticks() - before <= 10  # of 50


def test_two_at_once_then_ctrl_c_and_sigterm(model):
    with Served(model) as a, Served(model, tp=2) as b:
        a.ready(); b.ready()
        assert a.url != b.url and complete(a.url).status_code == complete(b.url).status_code == 200
        short, long = Reader(a.url, 40).started(), Reader(b.url, 3000).started()
        os.killpg(a.process.pid, signal.SIGINT)   # a terminal's Ctrl-C reaches every process of the group
        os.kill(b.process.pid, signal.SIGTERM)
        code, log = a.ended(25)
        assert short.finished(25).done, "it had time to end in the drain"
        assert code == 0 and "Traceback" not in log, log
        code, log = b.ended(25)
        assert not long.finished(25).done and code == 0 and "Traceback" not in log, log


def test_a_killed_worker_ends_streams_and_server(model):
    with Served(model) as a, Served(model) as b:
        for served, victim in ((a.ready(), "scheduler"), (b.ready(), "detokenizer")):
            streams = [Reader(served.url, 3000).started() for _ in range(2)]
            os.kill(served.worker(victim), signal.SIGKILL)
            code, log = served.ended(25)
            for s in streams:
                s.finished(25)
                assert not s.done and (s.error or "error" in json.loads(s.lines[-1].removeprefix("data: "))), (s.lines[-1], s.error)
            assert code == 1 and victim in log and "SIGKILL" in log, log
            with pytest.raises(httpx.TransportError): complete(served.url)


def test_a_killed_server_leaves_nobody(model):
    "No process, and where two ranks met, no directory"
    def meeting_places(): return set(Path(tempfile.gettempdir()).glob("minisgl-*"))
    before = meeting_places()
    with Served(model, tp=2) as a:
        a.ready()
        mine = meeting_places() - before
        Reader(a.url, 3000).started()
        os.kill(a.process.pid, signal.SIGKILL)
        code, _ = a.ended(25)
        assert code == -signal.SIGKILL and mine and not mine & meeting_places()


def test_a_worker_that_dies_under_a_handle_is_named(model):
    server = start_server(model=model, **OPTIONS)
    os.kill(server.pids["tokenizer-0"], signal.SIGKILL)
    assert server.done.wait(25) and "tokenizer-0" in server.failure
    server.stop()
    assert not children()


@pytest.mark.parametrize("victim", ["tokenizer-0", "detokenizer"])
def test_a_text_worker_that_stands_still_is_given_up_when_there_is_work(model, victim):
    server = start_server(model=model, watchdog_seconds=2, **OPTIONS)
    try:
        os.kill(server.pids[victim], signal.SIGSTOP)
        assert not server.done.wait(4), "idle is no crime"
        request = Reader(server.url, 2000)
        assert server.done.wait(60) and server.failure.startswith(f"{victim} hung"), server.failure
        assert not request.finished(60).done
    finally: server.stop()
    assert not children()


def test_a_handle_that_nobody_stops_ends_with_its_program(model, tmp_path):
    script = tmp_path/"forgetful.py"
    script.write_text(f"import sys; sys.path.insert(0, {ROOT!r})\nfrom minisgl_edu.launch import start_server\n"
                      f"if __name__ == '__main__': print(*start_server(model={model!r}, port=0).pids.values(), flush=True)\n")
    p = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=90)
    assert p.returncode == 0 and "Traceback" not in p.stderr, p.stderr
    assert not {int(n) for n in p.stdout.split()} & processes().keys()
