"The benchmark: traces, percentiles, a client against a small server, the command's refusals, and the tables of claims"
import asyncio, json, os, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest, torch

from minisgl_edu import benchmark as B
from minisgl_edu.benchmark import CLAIMS, STATEMENTS, VERDICTS, Claim, Session
from minisgl_edu.experiments import REGISTRY, save_record


# --- traces -----------------------------------------------------------------------------------------------------------

def test_a_trace_survives_its_file(tmp_path):
    trace = B.make_trace(20, rate=3, num_turns=2, shared_words=5, seed=1)
    B.save_trace(trace, tmp_path / "t.json")
    assert B.load_trace(tmp_path / "t.json") == trace == B.make_trace(20, rate=3, num_turns=2, shared_words=5, seed=1)
    assert B.make_trace(20, rate=3, seed=2) != B.make_trace(20, rate=3, seed=1)


def test_a_trace_is_what_was_asked_for():
    trace = B.make_trace(400, rate=8, words=(3, 5), answer=(7, 9), num_turns=2, shared_words=4)
    assert trace[0].at == 0 and all(a.at <= b.at for a, b in zip(trace, trace[1:]))
    assert 0.8 / 8 < trace[-1].at / 399 < 1.2 / 8
    lens = [len(text.split()) for s in trace for text, _ in s.turns[1:]]
    assert {min(lens), max(lens)} == {3, 5} and {len(s.turns[0][0].split()) for s in trace} == {7, 8, 9}
    assert {n for s in trace for _, n in s.turns} == {7, 8, 9} and len({" ".join(s.turns[0][0].split()[:4]) for s in trace}) == 1


@pytest.mark.parametrize("content,why", [
    ("", "JSONDecodeError"), ("{}", "no sessions"), ("[]", "no sessions"), ("[3]", "TypeError"), ('[{"at": 0}]', "KeyError"), ('[{"at": "soon", "turns": [["a", 1]]}]', "soon"),
    ('[{"at": 0, "turns": [["a"]]}]', "ValueError"), ('[{"at": 0, "turns": []}]', "needs turns"), ('[{"at": 0, "turns": [["a", 0]]}]', "at least one token"),
    ('[{"at": -1, "turns": [["a", 1]]}]', "arrives at -1"), ('[{"at": NaN, "turns": [["a", 1]]}]', "arrives at nan"), ("\xff", "not a trace")])
def test_what_is_not_a_trace_is_refused(tmp_path, content, why):
    (tmp_path / "t.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match="t.json is not a trace") as e: B.load_trace(tmp_path / "t.json")
    assert why in str(e.value)


def test_a_missing_trace_is_refused(tmp_path):
    with pytest.raises(ValueError, match="none.json is not a trace: No such file"): B.load_trace(tmp_path / "none.json")


def test_a_process_whose_first_call_fails_is_not_left_behind(monkeypatch):
    import multiprocessing, os
    before = set(multiprocessing.active_children())
    call, pools = B.OwnProcess.call, []
    def fail(self, fn, *args): pools.append(self.pool); call(self, fn, *args); raise RuntimeError("no start")
    monkeypatch.setattr(B.OwnProcess, "call", fail)
    with pytest.raises(RuntimeError, match="no start"): B.OwnProcess()
    assert set(multiprocessing.active_children()) == before
    with pytest.raises(RuntimeError, match="after shutdown"): pools[0].submit(os.getpid)


@pytest.mark.parametrize("args", [dict(num_sessions=0, rate=1), dict(num_sessions=1, rate=0), dict(num_sessions=1, rate=float("nan")), dict(num_sessions=1, rate=1, num_turns=0)])
def test_an_impossible_trace_is_refused(args):
    with pytest.raises(ValueError, match="a trace needs"): B.make_trace(**args)


# --- arithmetic -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("p", [0, 1, 37.5, 50, 99, 100])
def test_percentiles_are_numpys(p):
    import numpy as np
    values = [7.0, 1.0, 3.5, 3.5, -2.0, 100.0, 8.25]
    assert B.percentile(values, p) == pytest.approx(np.percentile(values, p))


@pytest.mark.parametrize("values,p", [([], 50), ([1], -1), ([1], 101), ([1], float("nan"))])
def test_an_impossible_percentile_is_refused(values, p):
    with pytest.raises(ValueError, match="a percentile needs"): B.percentile(values, p)


def test_summary():
    results = [dict(ttft_ms=10.0, gaps_ms=[2.0, 4.0], completion_tokens=3), dict(ttft_ms=30.0, gaps_ms=[], completion_tokens=1)]
    s = B.summarize(results)
    assert (s["requests"], s["tokens"], s["ttft_ms_p50"], s["itl_ms_p50"], s["tpot_ms_p50"]) == (2, 4, 20.0, 3.0, 1.5)
    assert B.summarize(results[1:])["itl_ms_p99"] == 0


def test_comparison_takes_medians_of_rounds():
    times = {"a": iter([1.0, 2.0, 9.0]), "b": iter([2.0, 8.0, 9.0])}
    work = B.equal_workload(2, 3, 4, 50)
    def peer(t): return lambda w: ([(0.25, 0.5), (0.5, next(t))], 1_000_000)  # first and last token of both requests; bytes
    a, b = B.compare(work, {n: peer(t) for n, t in times.items()}, 3, holds=5_000_000)
    assert (a["ttft_ms"], a["tpot_ms"], b["tpot_ms"]) == (375.0, pytest.approx(1e3 * (0.25 + 0.5) / 3 / 2), pytest.approx(1e3 / 3 * 0.875))
    assert (a["memory_mb"], b["memory_mb"]) == (6, 1)
    assert (work.output_tokens, work.prompt_tokens) == (8, 6) and (a["tokens_per_s"], a["low"], a["high"], a["ratio"]) == (4.0, 8 / 9, 8.0, 1.0)
    assert (b["tokens_per_s"], b["ratio"]) == (1.0, 2.0)
    text = B.table([dict(r, peer=p, ideal_tokens_per_s=16.0) for r, p in ((a, "minisgl_edu"), (b, "other"))])
    assert "25%" in text and "2.00x" in text


def test_workloads_are_seeded_and_different():
    work = B.equal_workload(5, 6, 2, 1000, seed=3)
    assert work == B.equal_workload(5, 6, 2, 1000, seed=3) and len({tuple(ids) for ids, _ in work.requests}) == 5
    assert {len(ids) for ids, _ in work.requests} == {6} and B.mixed_workload(5, 2, 9, 50, 1) != B.mixed_workload(5, 2, 9, 50, 2)


# --- the client -------------------------------------------------------------------------------------------------------

class Small(ThreadingHTTPServer):
    "A server that streams canned events, and keeps the bodies that it was sent"
    daemon_threads = True

    def __init__(self, events, status=200):
        self.events, self.status, self.bodies = events, status, []
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, kwargs=dict(poll_interval=0.01), daemon=True).start()

    @property
    def url(self): return f"http://127.0.0.1:{self.server_port}"
    def __exit__(self, *_): self.shutdown(); self.server_close()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass

    def do_POST(self):
        self.server.bodies.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
        self.send_response(self.server.status)
        self.end_headers()
        for e in self.server.events: self.wfile.write(f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n".encode()); self.wfile.flush()


def piece(text): return {"choices": [{"delta": {"content": text}}]}
def usage(n): return {"choices": [], "usage": dict(prompt_tokens=5, completion_tokens=n, prompt_tokens_details={"cached_tokens": 2})}
GOOD = [{"choices": [{"delta": {"role": "assistant"}}]}, piece("Hel"), piece("lo"), usage(2), "[DONE]"]


def play(server, trace, **params): return asyncio.run(B.replay(server.url, trace, **params))


def test_replay_talks_turn_by_turn():
    with Small(GOOD) as server:
        results = play(server, [Session(0.0, [("a", 3), ("b", 4)]), Session(0.01, [("c", 5)])], ignore_eos=True)
    assert {(r["session"], r["turn"], r["text"], r["prompt_tokens"], r["cached_tokens"], r["completion_tokens"]) for r in results} == {(s, t, "Hello", 5, 2, 2) for s, t in ((0, 1), (0, 2), (1, 1))}
    assert all(len(r["gaps_ms"]) == 1 and 0 <= r["ttft_ms"] <= r["seconds"] * 1e3 for r in results)
    second = next(body for _, body in server.bodies if len(body["messages"]) == 3)
    assert [m["content"] for m in second["messages"]] == ["a", "Hello", "b"] and [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
    assert second["max_tokens"] == 4 and second["stream"] and second["ignore_eos"] and second["temperature"] == 0
    assert {path for path, _ in server.bodies} == {"/v1/chat/completions"}


def test_an_answer_without_text_still_has_a_first_moment():
    with Small([usage(1), "[DONE]"]) as server: r, = play(server, [Session(0.0, [("a", 1)])])
    assert r["gaps_ms"] == [] and r["ttft_ms"] > 0 and r["text"] == ""


@pytest.mark.parametrize("events,status,why", [([], 400, "status 400"), (GOOD[:3], 200, "cut off"), ([piece("x"), {"error": {"message": "the engine fell over"}}], 200, "fell over")])
def test_a_failed_answer_is_an_error(events, status, why):
    with Small(events, status) as server, pytest.raises(RuntimeError, match=why): play(server, [Session(0.0, [("a", 1)])])


def _settings():
    import minisgl_edu
    return {name: os.environ.get(name) for name in ("THP_MEM_ALLOC_ENABLE", "GOMP_SPINCOUNT", "MINISGL_PLAIN")}, minisgl_edu._tuned

def test_a_peer_in_its_own_process_finds_torch_as_it_comes(monkeypatch):
    import minisgl_edu
    monkeypatch.setattr(minisgl_edu, "_tuned", {"THP_MEM_ALLOC_ENABLE": "1", "GOMP_SPINCOUNT": "20000"})
    for name, value in minisgl_edu._tuned.items(): monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with B.OwnProcess() as other: settings, tuned = other.call(_settings)
    assert settings == {"THP_MEM_ALLOC_ENABLE": None, "GOMP_SPINCOUNT": None, "MINISGL_PLAIN": "1"} and tuned == {}
    assert dict(os.environ) == before, "here they are as before"


def _peers_settings():
    with B.OwnProcess() as other: return other.call(_settings)

def test_a_process_that_inherited_our_settings_knows_them_as_ours(monkeypatch):
    "A peer of a child of ours finds torch as it comes too"
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    for name in ("GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE", "OMP_WAIT_POLICY", "MINISGL_PLAIN", "MINISGL_TUNED"): monkeypatch.delenv(name, raising=False)
    for name, value in dict(GOMP_SPINCOUNT="20000", THP_MEM_ALLOC_ENABLE="1", MINISGL_TUNED="THP_MEM_ALLOC_ENABLE,GOMP_SPINCOUNT").items(): monkeypatch.setenv(name, value)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        assert set(child.submit(_settings).result()[1]) == {"THP_MEM_ALLOC_ENABLE", "GOMP_SPINCOUNT"}
        assert child.submit(_peers_settings).result()[0] == {"THP_MEM_ALLOC_ENABLE": None, "GOMP_SPINCOUNT": None, "MINISGL_PLAIN": "1"}


def test_a_peer_that_dies_is_named():
    with B.OwnProcess() as other:
        with pytest.raises(RuntimeError, match="the process of the peer _exit died: killed, out of memory"): other.call(os._exit, 1)


def test_what_the_reader_has_chosen_reaches_the_peers(monkeypatch):
    import minisgl_edu
    monkeypatch.setattr(minisgl_edu, "_tuned", {})
    monkeypatch.setenv("GOMP_SPINCOUNT", "123")
    with B.OwnProcess() as other: assert other.call(_settings)[0]["GOMP_SPINCOUNT"] == "123"


def test_a_transformers_peer_serves_from_its_own_process(tiny_model_dir):
    work = B.mixed_workload(3, 2, 6, 128)
    with B.OwnProcess() as other:
        for size in (2, None):
            moments, extra = other.peer(B.make_transformers, str(tiny_model_dir), torch.float32, "cpu", size)(work)
            assert len(moments) == 3 and all(0 < first <= last for first, last in moments) and (extra is None or extra >= 0)


def test_the_engine_is_a_peer(tiny_model_dir):
    from minisgl_edu.experiments import host_ms
    from minisgl_edu.llm import LLM
    from minisgl_edu.scheduler import Scheduler
    with LLM(str(tiny_model_dir), device="cpu", num_pages=32, max_running_requests=4) as llm:
        rows = B.compare(B.mixed_workload(3, 2, 6, 128), {"minisgl_edu": lambda w: B.peak_above(lambda: B.engine_peer(llm)(w))}, 1)
        assert host_ms(Scheduler(llm.engine), 2, 3) > 0
        turns = B.turn_ttft(llm, {"other": lambda w: [(1.0, 1.0)]}, 128, (8, 4, 2, 2))
        llm.scheduler.check_integrity()
    assert rows[0]["tokens_per_s"] > 0 and [(r["peer"], r["turn"], r["prompt"]) for r in turns] == [(p, t, n) for t, n in ((1, 12), (2, 18)) for p in ("minisgl_edu", "other")]


# --- the command ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("args,why", [(["--rate", "0"], "--rate must be above 0"), (["--rate", "nan"], "--rate must be above 0"), (["--rate", "fast"], "invalid float"), (["--only", "half"], "invalid choice"),
                                      (["--trace", "none.json"], "none.json is not a trace"), (["--only", "offline", "--trace", "none.json"], "online half"), (["--sped"], "unrecognized")])
def test_wrong_arguments_are_refused_before_anything_runs(args, why, capsys, monkeypatch):
    for name in ("run_benchmark", "run_online"): monkeypatch.setattr(B, name, lambda *a, **k: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as e: B.main(["--quick", "--only", "online", *args])
    assert e.value.code == 2 and why in capsys.readouterr().err


def test_the_online_half_alone(capsys, monkeypatch, tmp_path):
    seen, loads = [], dict(kind="load", requests=2, last_arrival=1.0, tokens_per_s=4.0, **{f"{k}_p{p}": 1.0 for k in ("ttft_ms", "itl_ms", "tpot_ms") for p in (50, 99)})
    monkeypatch.setattr(B, "run_benchmark", lambda *a, **k: pytest.fail("the offline half ran"))
    monkeypatch.setattr(B, "run_online", lambda *a: seen.append(a) or [loads, dict(kind="host", batch=4, ms=0.5)])
    assert B.main(["--quick", "--only", "online", "--device", "cpu", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "2 requests over 1 s by HTTP" in out and "0.50 ms of host time" in out and "quick run" in out
    record = json.loads((tmp_path / "online.json").read_text())
    assert record["rows"][0]["kind"] == "load" and B.load_trace(tmp_path / "trace.json") == seen[0][4] and not (tmp_path / "benchmark.json").exists()
    assert B.main(["--quick", "--only", "online", "--device", "cpu", "--trace", str(tmp_path / "trace.json")]) == 0 and seen[1][4] == seen[0][4]


# --- the claims -------------------------------------------------------------------------------------------------------

RECORDS = {  # made up, with the columns that the experiments give
    "online": [dict(kind="load", ttft_ms_p50=27.0, itl_ms_p50=8.0), dict(kind="host", ms=0.4)],
    "engine": [dict(batch=1, tokens_per_s=10.0), dict(batch=8, tokens_per_s=76.0)],
    "scheduler": [dict(mode="padded", seconds=9.0, roofline_s=5.0), dict(mode="continuous", seconds=3.0, roofline_s=2.0)],
    "overlap": [dict(machine="sleeps", device_ms=2, plain_ms=3.0, overlapped_ms=2.1), dict(machine="real", plain_ms=12.0, overlapped_ms=10.0)],
    "details": [dict(what=w, way=y, us=us) for w, y, us in (("index", "each", 90.0), ("index", "one", 10.0), ("finished", "list", 20.0), ("finished", "set", 1.0), ("rows", "aligned", 10.0),
                ("rows", "off", 10.1), ("copy", "tokens to the host", 9.0), ("hop", "ZMQ", 12.0))] + [dict(what="page table", way=w, bytes=b) for w, b in (("int32", 2**20), ("int64", 2**21))]
               + [dict(what="newcomer", way=w, steps=s) for w, s in (("prefill-first", 1), ("decode-first", 9), ("decode-first, unbounded", 38))],
    "graphs": [dict(model="8B", batch=1, eager_ms=10.0, replay_ms=6.0, eager_host_ms=2.0, replay_host_ms=0.1), dict(model="8B", batch=8, eager_ms=10.0, replay_ms=8.0)],
    "sampling": [dict(batch=1, name="greedy", median_ms=0.1), dict(batch=1, name="model", median_ms=20.0)],
    "checkpoint": [dict(way="naive", peak_mib=1000.0, load_ms=900.0), dict(way="streamed", peak_mib=500.0, load_ms=300.0)],
    "server": [dict(way="event", wake_ms=0.1), dict(way="poll 10 ms", wake_ms=5.2)],
    "messages": [dict(n=1, round_trip_us=60.0, per_s=7e4), dict(n=64, round_trip_us=300.0, per_s=4e5)],
    "launch": [dict(worker="scheduler", phase="imported", seconds=3.0), dict(worker="http", phase="serving", seconds=6.0)],
}


def nothing(name): raise LookupError(name)
def made_up(name): return RECORDS[name]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.said[:30])
def test_every_claim_is_whole(claim):
    "Text, a prediction, a rule; judged without records and with made-up ones, on a CPU and on a GPU"
    assert claim.said and claim.reason and claim.chapter[:2].isdigit() and not claim.reason.endswith(".")
    assert "|" not in claim.said + claim.reason + B.try_text(claim.predict, made_up) and B.try_text(claim.predict, made_up) != "not measured"
    assert B.try_text(claim.measure, nothing, claim.show) == "not measured"
    for cpu, gpu in ((nothing, nothing), (made_up, nothing), (nothing, made_up), (made_up, made_up)): assert B.judge(claim, cpu, gpu) in VERDICTS
    if callable(claim.verdict):
        assert B.judge(claim, nothing, nothing) == ("not testable here" if claim.gpu_only else "not measured")
        assert B.judge(claim, nothing, made_up) in VERDICTS[:3] and B.judge(claim, made_up, made_up) == B.judge(claim, nothing, made_up)


def test_claims_use_experiments_that_exist():
    "Every record that a claim asks for is one that an experiment writes (or that a later chapter will)"
    asked = set()
    def ask(name): asked.add(name); return RECORDS[name]
    for c in CLAIMS:
        for fn in (c.predict, c.measure): B.try_text(fn, ask)
    assert asked == set(RECORDS) and asked - set(REGISTRY) <= {"graphs"}


@pytest.mark.parametrize("part,value,verdict", [("8 requests at once", 79.0, "true"), ("8 requests at once", 40.0, "depends")])
def test_a_verdict_hinges_on_the_number(part, value, verdict):
    claim = next(c for c in CLAIMS if c.said.startswith(part))
    rows = RECORDS | {"engine": [dict(batch=1, tokens_per_s=10.0), dict(batch=8, tokens_per_s=value)]}
    assert B.judge(claim, rows.__getitem__, nothing) == verdict


def test_a_gpu_has_the_last_word():
    claim = Claim("x", lambda rows: "", lambda rows: (rows("r"),), "{}", lambda x: "true" if x else "false", "y", "01_core")
    yes, no = {"r": True}.__getitem__, {"r": False}.__getitem__
    assert (B.judge(claim, yes, no), B.judge(claim, yes, nothing), B.judge(claim._replace(gpu_only=True), yes, nothing)) == ("false", "true", "not testable here")


def test_tables_are_markdown():
    lines = B.claims_table(CLAIMS, made_up, nothing).split("\n")
    assert len(lines) == len(CLAIMS) + 2 and {line.count("|") for line in lines} == {7}
    lines = B.statements_table(STATEMENTS).split("\n")
    assert len(lines) == len(STATEMENTS) + 2 and {line.count("|") for line in lines} == {4}


def test_every_statement_is_whole():
    assert all(s.said and s.reason and s.verdict in VERDICTS[:4] and s.chapter[:2].isdigit() for s in STATEMENTS)
    assert len({s.said for s in STATEMENTS}) == len(STATEMENTS) and len({c.said for c in CLAIMS}) == len(CLAIMS)


def test_records_come_from_files(tmp_path):
    save_record(dict(name="engine", rows=RECORDS["engine"], provenance=dict(kind="cpu")), tmp_path / "cpu")
    assert B.records_of("cpu", tmp_path)("engine") == RECORDS["engine"]
    for kind, name in (("cuda", "engine"), ("cpu", "graphs")):
        with pytest.raises(LookupError): B.records_of(kind, tmp_path)(name)


def test_a_skipped_record_is_no_measurement():
    "A row that says why nothing was measured has none of the columns"
    for c in CLAIMS: assert B.try_text(c.measure, lambda name: [dict(skipped="no web framework", us=None)], c.show) == "not measured"


# --- the measuring cells ----------------------------------------------------------------------------------------------

def test_the_refined_prediction_adds_up():
    "Products at the rate of their rows, attention at its own, the rest at copy rate plus launches"
    from minisgl_edu.device import Ceilings, OpCost
    from minisgl_edu.experiments import refined_ms
    rates = {1: 10.0, 4: 5.0, 16: 4.0, 64: 2.0, "attention": 12.0}
    costs = [OpCost("qkv", 10**9, 0), OpCost("lm_head", 10**9, 0), OpCost("attention", 6 * 10**8, 0), OpCost("pointwise", 10**8, 0)]
    ceilings = Ceilings(40.0, 50.0, 1.0, 2.0, "pretended", None)
    for rows, products in ((1, 200), (4, 400), (16, 500), (64, 1000), (32, 750)): assert refined_ms(costs, rows, ceilings, rates, 1000) == pytest.approx((products, 50, 2 + 2))


def test_a_forced_step_reads_what_it_says(tiny_model_dir):
    "Contexts and scattered pages of the step that is timed"
    from minisgl_edu.engine import Engine, EngineConfig
    from minisgl_edu.experiments import decode_at
    eng = Engine(EngineConfig(model=str(tiny_model_dir), device="cpu", page_size=4, num_pages=24, max_running_requests=3, max_seq_len=32))
    seen, forward = [], eng.forward_batch
    eng.forward_batch = lambda ctx, args: seen.append(ctx) or forward(ctx, args)
    step, _ = decode_at(eng, 3, 32)
    step()
    eng.close()
    assert seen[0].cached_lens == [31] * 3 and seen[0].device_lens == [32] * 3
    slots = eng.page_table[:3, :32]
    assert sorted(slots.flatten().tolist()) == list(range(96)) and slots[1, :8].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]


def test_a_newcomer_waits_as_its_policy_says():
    from minisgl_edu.experiments import steps_waited
    assert steps_waited({"prefill-first": "prefill-first", "mixed": "mixed", "decode-first": "decode-first"}, 4) == {"prefill-first": 1, "mixed": 1, "decode-first": 9}


def test_a_hop_over_zmq():
    from minisgl_edu.experiments import zmq_hop_us
    pytest.importorskip("zmq")
    assert zmq_hop_us(5) > 0


def test_without_zmq_nothing_is_measured(monkeypatch):
    import sys
    from minisgl_edu.experiments import zmq_hop_us
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert zmq_hop_us(5) is None


@pytest.mark.parametrize("name", ["benchmark", "online", "step_times"])
def test_what_a_gpu_machine_lacks_is_said(name):
    "A record that says why, with the columns that it has units for"
    rows = REGISTRY[name].fn(device="cuda", quick=True, seed=0)
    assert len(rows) == 1 and rows[0]["skipped"] and set(REGISTRY[name].units) <= set(rows[0])


def test_llama_cpp_is_refused_where_it_cannot_compare(monkeypatch, capsys):
    for name in ("run_benchmark", "run_online"): monkeypatch.setattr(B, name, lambda *a, **k: pytest.fail("it ran"))
    for found, args in ((True, ["--only", "online"]), (True, ["--device", "cuda"]), (False, [])):
        monkeypatch.setattr(B, "find_spec", lambda name: found)
        with pytest.raises(SystemExit): B.main(["--llama", *args])
        assert "pip install xllamacpp" in capsys.readouterr().err


def test_weights_for_llama_cpp(tmp_path):
    gguf, path = pytest.importorskip("gguf"), B.resolve_model(None)
    B.write_gguf(path, tmp_path / "m.gguf")
    read = gguf.GGUFReader(tmp_path / "m.gguf")
    config, tensors = B.ModelConfig.from_dir(path), {t.name: t for t in read.tensors}
    assert len(tensors) == 2 + 9 * config.num_layers and all(t.tensor_type == gguf.GGMLQuantizationType.F32 for t in read.tensors)
    assert len(read.get_field("tokenizer.ggml.tokens").data) == config.vocab_size
    from minisgl_edu.checkpoint import _unpermute
    from safetensors.numpy import load_file
    w = load_file(path / "model.safetensors")["model.layers.3.self_attn.k_proj.weight"]
    assert (_unpermute(tensors["blk.3.attn_k.weight"].data.reshape(w.shape), config.num_kv_heads) == w).all()


def test_llama_cpp_is_not_compared_on_other_models(tiny_model_dir, tmp_path):
    raw = json.loads((tiny_model_dir / "config.json").read_text()) | {"architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"): B.write_gguf(tmp_path, tmp_path / "m.gguf")
