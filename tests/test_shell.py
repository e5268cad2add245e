"The shell: piped, typed into prompt_toolkit, and in a terminal with Ctrl-C"
import fcntl, io, os, pty, re, select, signal, struct, subprocess, sys, termios, time

import pytest

from minisgl_edu.cli import ENGINE_FLAGS, Conversation, build_parser, given, main, read_lines

FLAGS = ["--max-seq-len", "512", "--max-tokens", "24"]


@pytest.fixture
def home(tmp_path, model_dir, monkeypatch):
    "A cache directory of our own, with the model in it: the history goes there"
    (tmp_path / model_dir.name).symlink_to(model_dir)
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path))
    return tmp_path


def test_a_conversation_through_a_pipe(model_dir, monkeypatch, capsys):
    lines = ["What is the capital of France?", "/stats", "", "And of Italy?", "/stats", "/reset", "/sit", "/exit", "never read"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["shell", "--model", str(model_dir), *FLAGS]) == 0
    france, stats, italy, again, reset, wrong = capsys.readouterr().out.splitlines()
    assert "Paris" in france and "Rome" in italy and "new conversation" in reset
    assert stats.endswith("0 of 37 prompt tokens were cached")
    cached, prompt = map(int, re.search(r"(\d+) of (\d+) prompt tokens were cached", again).groups())
    assert prompt > 50 and cached >= 32  # the second turn found the first in the prefix cache
    assert wrong.startswith("error: /sit is no command")


def test_settings_are_checked_and_used():
    said, asked = [], []
    class Model:
        def stream(self, messages, params): asked.append(params); raise ValueError("enough")
    chat = Conversation(Model(), {"temperature": 0.0, "max_tokens": None}, said.append)
    for line in ("/set temperature 0.2", "/set seed 7", "/set max_tokens 5", "/set ignore_eos true", "hi", "/set seed none", "/set max_tokens none", "hi"): assert chat.take(line)
    assert [(p.temperature, p.seed, p.max_tokens, p.ignore_eos) for p in asked] == [(0.2, 7, 5, True), (0.2, None, None, True)]
    before = dict(chat.sampling)
    for bad in ("/set top_p 7", "/set top_p", "/set top_p x", "/set n 2", "/set temperature nan", "/set temperature none", "/set ignore_eos 1", "/set top_k 1 2", "/reset x", "/"):
        said.clear()
        assert chat.take(bad) and said[0].startswith("error: ") and said[0].count("\n") == 1, bad
    assert chat.sampling == before and chat.messages == []
    assert not chat.take("/exit")


def test_an_interrupt_ends_the_answer_and_keeps_what_was_said():
    from contextlib import contextmanager
    from minisgl_edu.llm import Output
    closed, said = [], []
    class Model:
        @contextmanager
        def stream(self, messages, params):
            class Pieces:
                output = Output("Once", [1], None, [0] * 5)
                def __iter__(self): yield "Once"; raise KeyboardInterrupt
            try: yield Pieces()
            finally: closed.append(True)
    chat = Conversation(Model(), {}, said.append)
    assert chat.take("Tell me") and closed == [True] and "".join(said) == "Once [stopped]\n"
    assert [m["content"] for m in chat.messages] == ["Tell me", "Once"]


def test_help_tells_the_defaults(capsys):
    def told(command):
        with pytest.raises(SystemExit): main([command, "--help"])
        return " ".join(capsys.readouterr().out.split())
    text = told("serve")
    for flag, default in (("port PORT", 1919), ("page-size SIZE", 16), ("memory-ratio RATIO", 0.9), ("watchdog-seconds SECONDS", 60.0), ("policy POLICY", "prefill-first"), ("host HOST", "127.0.0.1"), ("max-running-req REQUESTS", 64)):
        assert re.search(rf"--{flag} (?:(?! --).)*\(default: {re.escape(str(default))}\)", text), (flag, text)
    assert "None" not in text and "False" not in text and text.startswith("usage: minisgl-edu serve [FLAGS] Serve")
    text = told("generate")
    assert "PENALTY the same" in text and "(default: -1)" in text and "another one each time --" in text
    for flag, default in (("temperature TEMPERATURE", 0.0), ("max-running-req REQUESTS", 1)): assert re.search(rf"--{flag} (?:(?! --).)*\(default: {default}\)", text)  # the command's own


def test_help_says_what_happens_to_a_flag_that_is_left_out():
    from minisgl_edu.cli import ENGINE_FLAGS, OURS, SAMPLING_FLAGS, SERVER_FLAGS
    from minisgl_edu.core import SamplingParams
    from minisgl_edu.launch import ServerConfig
    for flags, config, ours in ((ENGINE_FLAGS + SERVER_FLAGS, ServerConfig, {}), (SAMPLING_FLAGS, SamplingParams, OURS)):
        silent = [f.field for f in flags if f.type and ours.get(f.field, getattr(config, f.field)) is None and "left out: " not in f.help and "with neither, " not in f.help]
        assert not silent


@pytest.mark.parametrize("seconds", [0.3, 0.7, 1.2, 2.0])
def test_ctrl_c_while_it_loads_is_no_traceback(seconds):
    code = "import sys; from minisgl_edu.cli import main; print('up', flush=True); sys.argv[1:] = ['serve', '--model', '/nowhere/at/all', '--port', '0']; sys.exit(main())"
    p = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert p.stdout.readline() == "up\n"
    time.sleep(seconds)
    p.send_signal(2)
    _, err = p.communicate(timeout=60)
    assert "Traceback" not in err and p.returncode in (130, 1, 0), (p.returncode, err)


@pytest.mark.parametrize("before, told, words", [(signal.SIG_DFL, 130, ""), (signal.SIG_IGN, 1, "error: no such model directory: /nowhere/at/all\n")])
def test_ctrl_c_that_a_library_swallows_while_it_loads_ends_all_the_same(before, told, words):
    "Unless whoever started the process has decided that it hears none"
    code = """
import importlib.abc, os, sys
class Swallows(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "minisgl_edu.launch":
            try: os.kill(os.getpid(), 2); sum(range(1000))
            except BaseException: pass
sys.meta_path.insert(0, Swallows())
from minisgl_edu.cli import main
sys.argv[1:] = ["serve", "--model", "/nowhere/at/all", "--port", "0"]
sys.exit(main())"""
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, preexec_fn=lambda: signal.signal(signal.SIGINT, before))
    assert (p.returncode, p.stderr) == (told, words)


def test_ctrl_c_while_python_is_taken_down_changes_no_exit_code():
    late = "import os, sys; Late = type('Late', (), {'__del__': lambda self, kill=os.kill, pid=os.getpid(): kill(pid, 2)}); late = Late(); "
    code = late + "from minisgl_edu.cli import main; sys.argv[1:] = ['generate', 'hi', '--top-k', 'many']; sys.exit(main())"
    p = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert p.returncode == 2 and "Traceback" not in p.stderr, (p.returncode, p.stderr)


def test_the_command_line_alone_loads_no_torch():
    code = "import sys, minisgl_edu.cli as c; c.build_parser().parse_args(['serve', '--port', '0']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("command, words", [("serve", "--prot 8"), ("shell", "--top_k 4"), ("generate", "hi --top_k"), ("fetch", "it"), ("bench", "--fast"), ("experiments", "--fast")])
def test_an_unknown_flag_shows_the_usage_of_its_command(command, words, capsys):
    with pytest.raises(SystemExit) as e: main([command, *words.split()])
    said = capsys.readouterr().err
    assert e.value.code == 2 and said.startswith(f"usage: minisgl-edu {command} [")
    assert f"minisgl-edu {command}: error: unrecognized arguments: {words.removeprefix('hi ')}" in said


@pytest.mark.parametrize("words", [("--disable-overlap", "--enable-overlap"), ("--enable-overlap", "--page-size", "4", "--disable-overlap")])
def test_flags_that_contradict_each_other_are_refused_together(words, capsys):
    with pytest.raises(SystemExit) as e: main(["serve", *words])
    said = capsys.readouterr().err
    assert e.value.code == 2 and f"argument {words[-1]}: not allowed with argument {words[0]}" in said


def test_the_last_of_two_equal_flags_counts():
    args = build_parser().parse_args("serve --disable-overlap --disable-overlap --page-size 4 --page-size 8".split())
    assert given(args, ENGINE_FLAGS) == {"disable_overlap": True, "page_size": 8}
    assert given(build_parser().parse_args(["shell", "--enable-overlap"]), ENGINE_FLAGS) == {"disable_overlap": False}


def test_a_bad_flag_ends_the_shell_at_once(model_dir, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main(["shell", "--model", str(model_dir), "--top-p", "7", *FLAGS[:2]]) == 1
    assert "top_p" in capsys.readouterr().err


def test_typed_lines_have_history_and_completion(home):
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        lines = read_lines(True)
        keys.send_text("hello\r");                 assert next(lines) == "hello"
        keys.send_text("half a line\x03next\r");   assert next(lines) == "next"        # Ctrl-C throws the line away
        keys.send_text("\x1b[A\x1b[A\r");          assert next(lines) == "hello"       # up, up
        keys.send_text("\x04")                                                         # Ctrl-D
        assert list(lines) == []
    assert "+hello" in (home / "shell_history").read_text()


def test_where_nothing_can_be_written_the_history_lasts_as_long_as_the_shell(tmp_path, monkeypatch):
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "file"))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        lines = read_lines(True)
        keys.send_text("hello\r");     assert next(lines) == "hello"
        keys.send_text("\x1b[A\r");    assert next(lines) == "hello"
        keys.send_text("\x04")
        assert list(lines) == []


def test_what_completion_offers(home, monkeypatch):
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document
    import prompt_toolkit
    seen = {}
    class Session:
        def __init__(self, **kw): seen.update(kw)
        def prompt(self, text): raise EOFError
    monkeypatch.setattr(prompt_toolkit, "PromptSession", Session)
    assert list(read_lines(True)) == []
    def offers(text): return {c.text for c in seen["completer"].get_completions(Document(text), CompleteEvent())}
    assert offers("/re") == {"/reset"} and offers("/") >= set(Conversation.COMMANDS) and offers("/set te") == {"/set temperature "} and offers("Tell ") == set()


def test_in_a_terminal_ctrl_c_stops_the_answer_and_not_the_shell(model_dir, home):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen([sys.executable, "-m", "minisgl_edu", "shell", "--model", str(model_dir), "--max-seq-len", "4096", "--ignore-eos"], stdin=theirs, stdout=theirs, stderr=theirs,
                               start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    text = ""
    def until(pattern, seconds=120):
        nonlocal text
        end = time.monotonic() + seconds
        while not re.search(pattern, text):
            assert time.monotonic() < end and process.poll() is None, text[-2000:]
            if select.select([ours], [], [], 0.2)[0]:
                got = os.read(ours, 65536).decode(errors="replace")
                if "\x1b[6n" in got: os.write(ours, b"\x1b[1;1R")  # a terminal says where its cursor is
                text += got
        text = text[re.search(pattern, text).end():]
    try:
        until("Chat away.*leaves"); until(">")
        os.write(ours, b"Tell me a very long story.\r")
        until(r"\n[^\x1b\n]{20,}")  # the answer has begun: text without the escape sequences of a line editor
        os.write(ours, b"\x03")
        until(r"\[stopped\]"); until(">")
        os.write(ours, b"/stats\r")
        until("prompt tokens were cached"); until(">")
        os.write(ours, b"\x04")
        assert process.wait(60) == 0
    finally:
        if process.poll() is None: process.kill()
        process.wait()
        os.close(ours)
