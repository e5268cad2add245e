"Tensor parallelism, whole: the same tokens on any number of ranks, one decision for all, and no rank that dies or hangs unnoticed"
import json, os, signal, socket, subprocess, sys, time
from itertools import accumulate
from pathlib import Path

import httpx
import pytest
import torch

import slow_attention
from minisgl_edu.checkpoint import ModelConfig
from minisgl_edu.core import EXAMPLES, SamplingParams, random_workload
from minisgl_edu.distributed import TPGroup, rank_device, run_ranks
from minisgl_edu.engine import Engine, EngineConfig, agree, kv_budget
from minisgl_edu.launch import ServerConfig, Watchdog, check_ranks, start_server
from minisgl_edu.llm import LLM
from minisgl_edu.messages import AbortMsg, Channel
from minisgl_edu.overlap import make_scheduler
from minisgl_edu.workers import IDLE_SECONDS, check_step, receive
from test_launch import OPTIONS, ROOT, Reader, children, complete, model  # `model` is a fixture

BASE = dict(device="cpu", dtype="float64", page_size=4, num_pages=64, max_running_requests=4, max_seq_len=128)
WAYS = {
    "plain":      dict(),
    "overlap":    dict(disable_overlap=False),
    "chunked":    dict(disable_overlap=False, max_prefill_length=7, policy="mixed"),
    "naive":      dict(cache="naive", page_size=1, num_pages=256),
    "optimistic": dict(disable_overlap=False, admission="optimistic", num_pages=20, max_prefill_length=16),
    "float32":    dict(dtype="float32"),
}
WORK = random_workload(8, 3, 40, 128, seed=3)
WORK += [(WORK[0][0] + [5, 6], SamplingParams(temperature=0.0, max_tokens=12)), (WORK[1][0], SamplingParams(temperature=0.0, max_tokens=30))]


def drive(engine, work, abort=None):
    "All requests through a scheduler; tokens and end of each; request `abort` is aborted after its third token"
    scheduler, tokens, ends = make_scheduler(engine), {i: [] for i in range(len(work))}, {}
    for i, (ids, params) in enumerate(work): scheduler.add(i, ids, params)
    while scheduler.has_work:
        for e in scheduler.step():
            if e.token_id is not None: tokens[e.uid].append(e.token_id)
            if e.finish_reason: ends[e.uid] = e.finish_reason
            if e.uid == abort and len(tokens[abort]) == 3 and abort not in ends: scheduler.abort(abort)
    scheduler.check_integrity()
    stats = scheduler.stats()
    scheduler.close()
    return list(tokens.values()), ends, stats


def every_way(group, model_dir):
    "What `drive` gives under each configuration; then sampled, with and without seeds"
    out = {}
    def run(name, options, *args):
        engine = Engine(EngineConfig(model=model_dir, **{**BASE, **options}), group)
        try: out[name] = drive(engine, *args) + (engine.num_pages, group and group.calls[0])
        finally: engine.close()
    for name, options in WAYS.items(): run(name, options, WORK)
    run("abort", WAYS["overlap"], WORK, 2)
    drawn = [(ids, SamplingParams(temperature=0.9, max_tokens=20, top_p=0.9 if i % 2 else 1.0, seed=i)) for i, (ids, _) in enumerate(WORK)]
    run("seeded", WAYS["overlap"], drawn)
    run("unseeded", WAYS["overlap"], [(ids, SamplingParams(temperature=0.9, max_tokens=20)) for ids, _ in WORK])
    return out


@pytest.fixture(scope="module")
def alone(tiny_model_dir): return every_way(None, str(tiny_model_dir))
@pytest.fixture(scope="module")
def pair(tiny_model_dir): return run_ranks(every_way, 2, str(tiny_model_dir), timeout=180)


# --- the same tokens ---

@pytest.mark.parametrize("way", [*WAYS, "abort", "seeded"])
def test_two_ranks_give_the_tokens_of_one(way, alone, pair):
    assert pair[0][way][:3] == pair[1][way][:3], "tokens, ends and all counters agree between the ranks"
    assert pair[0][way][0] == alone[way][0] and pair[0][way][1] == alone[way][1]
    if way == "abort": assert pair[0][way][1][2] == "abort"
    if way == "optimistic": assert pair[0][way][2]["retracted"] > 0, "the case must be hard enough to push requests back"


def test_draws_without_a_seed_are_rank_0s(pair):
    assert pair[0]["unseeded"][:3] == pair[1]["unseeded"][:3] and any(pair[0]["unseeded"][0])


def test_ranks_exchange_twice_a_layer_and_once_at_each_end(pair):
    "The count that the watchdog looks at: 2 layers, embedding, logits"
    steps = accumulate(stats["steps"] for _, _, stats, _, _ in pair[0].values())
    assert [calls for *_, calls in pair[0].values()] == [6 * s for s in steps]


def long_words(group):
    "Objects around the size that travels at once, and rank 0's numbers"
    return [group.broadcast_object(bytes(n) if group.rank == 0 else None) for n in (0, 4000, 4060, 4096, 100_000)], group.broadcast(torch.arange(3) + 7 * group.rank).tolist()


def test_objects_of_any_length_and_numbers_come_from_rank_0():
    for objects, numbers in run_ranks(long_words, 2): assert [len(o) for o in objects] == [0, 4000, 4060, 4096, 100_000] and numbers == [0, 1, 2]


# --- what is refused, and what is agreed ---

def test_a_split_that_the_model_cannot_have_is_refused_before_anything_starts(model_dir, monkeypatch):
    with pytest.raises(ValueError, match=r"tp=2: .*9.* 2 ranks"): start_server(model=model_dir, tp=2, port=0, device="cpu")
    assert not children()
    check_ranks(ServerConfig(tp=3, device="cpu"), ModelConfig.from_dir(model_dir))


def test_devices_are_counted(monkeypatch):
    assert rank_device("cpu", 1, 2) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(rank_device(d, 1, 2)) for d in ("cuda", None)] == ["cuda:1"] * 2 and str(rank_device("cuda:1", 0, 1)) == "cuda:1"
    for device, size, word in (("cuda", 3, "3 ranks need 3 GPUs, and PyTorch sees 2"), ("cuda:1", 2, "use 'cuda'")):
        with pytest.raises(ValueError, match=word): rank_device(device, 0, size)


class Uneven(TPGroup):
    "A rank of two; the other has `less` bytes"
    def __init__(self, less): super().__init__(); self.less = less
    def min_max(self, value): return value - self.less, value


def test_the_poorest_rank_decides_and_a_gap_of_more_than_2_gib_is_an_error(tiny_model_dir, monkeypatch):
    gib = 2**30
    assert agree(Uneven(2 * gib), 9 * gib) == 7 * gib
    with pytest.raises(ValueError, match=rf"{6 * gib:,} and {9 * gib:,} bytes.*2 GiB"): agree(Uneven(3 * gib), 9 * gib)
    assert kv_budget(EngineConfig(), torch.device("cpu"), 0, 8 * gib, tp=4) == gib // 2
    monkeypatch.setattr("minisgl_edu.engine.memory_free", lambda device: 16 * gib)
    options = dict(model=str(tiny_model_dir), device="cpu", max_running_requests=10**6)
    with pytest.raises(ValueError, match="2 GiB"): Engine(EngineConfig(**options), Uneven(3 * gib))
    Engine(EngineConfig(**{**options, "max_running_requests": 4, "num_pages": 8}), Uneven(3 * gib)).close()  # then memory does not matter


# --- one inbox ---

def test_only_rank_0_reads_the_inbox_and_an_idle_one_wakes_now_and_then():
    class Group(TPGroup):
        def broadcast_object(self, obj): said.append(obj); return obj if self.rank == 0 else ["heard"]
    class Inbox:
        def recv(self, *args): asked.append(args); return ["msg"]
    said, asked = [], []
    assert receive(Inbox(), Group(0, 2), block=True) == ["msg"] and receive(Inbox(), Group(1, 2), block=True) == ["heard"]
    assert said == [["msg"], None] and asked == [(True, IDLE_SECONDS)]
    receive(Inbox(), TPGroup(), block=True)
    assert asked[1:] == [(True, None)], "a single rank sleeps as long as it likes"


def test_the_watchdog_barks_only_at_work_that_stands_still():
    inbox = Channel()
    pulses = [[10, 3, 1], [10, 3, 1], [8, 3, 0]]
    def bark(looks, change=lambda i: None):
        dog, seen = Watchdog(pulses, inbox), []
        for i in range(looks): change(i); seen.append(dog.look())
        return next((s for s in seen if s), None)
    def layer(i): pulses[2][0] += i % 4 == 0  # slow, but it moves
    assert bark(Watchdog.LOOKS) is None and bark(Watchdog.LOOKS + 1) == [2] and bark(100, layer) is None
    for p in pulses: p[:] = 10, 3, 0
    assert bark(100) is None
    inbox.send([AbortMsg(1)])
    while not inbox._queue._reader.poll(): time.sleep(0.01)
    assert bark(100) == [0, 1, 2]
    inbox.recv(); inbox.close()


# --- servers ---

def test_three_ranks_serve_the_default_model_and_a_killed_one_is_named(model_dir):
    with LLM(model_dir, device="cpu", max_running_requests=4, max_seq_len=256) as llm:
        params = [SamplingParams(temperature=0.0, max_tokens=e.max_tokens) for e in EXAMPLES]
        expected = [o.token_ids for o in llm.generate([e.prompt for e in EXAMPLES], params)]
    server = start_server(model=model_dir, tp=3, port=0, device="cpu", max_running_requests=4, max_seq_len=1024)
    try:
        assert sorted(server.pids) == ["detokenizer", "scheduler", "scheduler-1", "scheduler-2", "tokenizer-0"] and server.engine_info["tp"] == 3
        answers = [httpx.post(f"{server.url}/generate", json=dict(prompt=e.prompt, max_tokens=e.max_tokens, temperature=0), timeout=120).json() for e in EXAMPLES]
        assert [a["token_ids"] for a in answers] == expected
        time.sleep(0.5)
        before = [cpu_ticks(pid) for name, pid in server.pids.items() if "scheduler" in name]
        time.sleep(0.5)
        assert sum(cpu_ticks(pid) for name, pid in server.pids.items() if "scheduler" in name) - sum(before) <= 20, "idle ranks spin"  # of 150
        stream = Reader(server.url, 900).started()
        os.kill(server.pids["scheduler-2"], signal.SIGKILL)
        assert server.done.wait(60) and server.failure == "scheduler-2 died: killed by signal 9 (SIGKILL)"
        ends_with_an_error(stream)
    finally: server.stop()
    assert not children()


def cpu_ticks(pid): return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))


def ends_with_an_error(stream):
    stream.finished(60)
    assert not stream.done and (stream.error or "error" in json.loads(stream.lines[-1].removeprefix("data: "))), (stream.lines[-1], stream.error)


def test_two_ranks_serve_many_at_once_and_a_stopped_one_is_given_up(model):
    "Sampled and greedy, aborted and not; then rank 1 stands still"
    options = dict(attention_backend=slow_attention.Slow, max_prefill_length=16, disable_overlap=False, admission="optimistic", **OPTIONS)
    server = start_server(model=model, tp=2, watchdog_seconds=4, **options)
    try:
        other = Reader(server.url, 60).started()
        with httpx.stream("POST", f"{server.url}/v1/completions", json=dict(prompt="Hi", max_tokens=2000, stream=True, ignore_eos=True), timeout=60) as r: next(r.iter_lines())  # and leave
        texts = [complete(server.url, prompt=p, max_tokens=8, ignore_eos=True).json()["choices"][0]["text"] for p in ("Hi", "Hi", "Once upon a time " * 9)]
        assert texts[0] == texts[1] and complete(server.url, temperature=1.0, max_tokens=20).status_code == 200
        assert other.finished(60).done
        time.sleep(5)  # idle for longer than the watchdog's patience
        stream = Reader(server.url, 3000).started()
        os.kill(server.pids["scheduler-1"], signal.SIGSTOP)
        assert server.done.wait(60) and server.failure.startswith(("scheduler-1 hung", "scheduler, scheduler-1 hung")), server.failure  # rank 0 waits for it inside the same call, and may be named too
        ends_with_an_error(stream)
    finally: server.stop()
    assert not children()


def test_a_scheduler_that_was_stopped_while_idle_is_noticed_at_the_next_request(model):
    server = start_server(model=model, watchdog_seconds=2, **OPTIONS)
    try:
        os.kill(server.pids["scheduler"], signal.SIGSTOP)
        assert not server.done.wait(4), "idle is no crime"
        request = Reader(server.url, 5)
        assert server.done.wait(60) and server.failure.startswith("scheduler hung")
        request.finished(60)
        assert not request.done
    finally: server.stop()
    assert not children()


def test_a_rank_that_fails_alone_takes_the_server_with_it(model):
    server = start_server(model=model, tp=2, attention_backend=slow_attention.FailsOnRank1, **OPTIONS)
    try:
        complete(server.url)
        assert server.done.wait(60) and "scheduler-1 died" in server.failure and "rank 1 ran out" in server.failure, server.failure
    finally: server.stop()
    assert not children()


# --- torchrun ---

SCRIPT = """
import json, os, sys
sys.path[:0] = {paths!r}
from minisgl_edu import LLM, SamplingParams
from test_tp import BASE, WORK
with LLM({model!r}, **BASE) as llm:
    first = [o.token_ids for o in llm.generate([ids for ids, _ in WORK], [p for _, p in WORK])]
with LLM({model!r}, **{{**BASE, "disable_overlap": False}}) as llm, LLM({model!r}, **BASE) as other:  # again, and two at once
    drawn = llm.generate(WORK[0][0], SamplingParams(max_tokens=30))[0].token_ids
    with llm.stream(WORK[0][0], SamplingParams(temperature=0.0, max_tokens=9)) as stream:
        next(stream, None)
        second = [o.token_ids for o in other.generate([ids for ids, _ in WORK], [p for _, p in WORK])]
with open(f"{out}/{{os.environ['RANK']}}.json", "w") as f: json.dump([llm.engine.tp.size, first, second, drawn], f)
"""


def test_two_hosts_under_torchrun_give_the_tokens_of_one(tiny_model_dir, alone, tmp_path):
    "Two agents on loopback, as two machines would run them"
    script = tmp_path/"script.py"
    script.write_text(SCRIPT.format(paths=[ROOT, str(Path(__file__).parent)], model=str(tiny_model_dir), out=str(tmp_path)))
    with socket.socket() as s: s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    def agent(rank):
        args = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port), str(script)]
        return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *args], env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    agents = [agent(r) for r in range(2)]
    try: logs = [a.communicate(timeout=180)[1] for a in agents]
    finally:
        for a in agents:
            if a.poll() is None: os.killpg(a.pid, signal.SIGKILL); a.wait()
    assert [a.returncode for a in agents] == [0, 0], logs
    (size, first, second, drawn), other = (json.loads((tmp_path/f"{r}.json").read_text()) for r in range(2))
    assert other == [size, first, second, drawn] and size == 2 and len(drawn) > 0
    assert first == second == alone["plain"][0]


# --- one GPU ---

@pytest.mark.parametrize("name", ["distributed", "tensor_parallel"])
def test_a_machine_with_one_gpu_gets_a_note_instead_of_a_measurement(name, monkeypatch):
    from minisgl_edu.experiments import _rows, find_experiment
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    exp = find_experiment(name)
    row, = _rows(exp, exp.fn(device="cuda", quick=True, seed=0))
    assert row["note"] == "2 ranks need 2 GPUs, and PyTorch sees 1 here"
