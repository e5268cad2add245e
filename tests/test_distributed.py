"Ranks in processes: what they compute together, and that none is left behind"
import multiprocessing
import os
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from minisgl_edu.device import Stream
from minisgl_edu.distributed import TPGroup, divide, from_torchrun, init_tp, run_ranks, single


# what the ranks run: top-level functions, a spawned process imports them by name

def gather_rows(group):
    "F33: rank r has rows [10 i + 3 r, ...]; joined, each row counts through"
    part = lambda rows: torch.tensor([[10 * i + 3 * group.rank + j for j in range(3)] for i in range(rows)])
    first_dim = group.all_gather(torch.full((1, 2), group.rank), dim=0)
    transposed = group.all_gather(part(2).t().contiguous().t()) # not contiguous in memory
    return [group.all_gather(part(rows)).tolist() for rows in (1, 2, 3)], first_dim.tolist(), transposed.tolist()


def reduce_all(group):
    out = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        t = torch.full((2, 3), group.rank + 1.0, dtype=dtype)
        same = group.all_reduce(t) is t
        out[str(dtype)] = same and t.unique().tolist()
    return out


def talk(group):
    mine = {"tokens": [1, 2], "who": group.rank}
    return group.broadcast_object(mine), group.min_max(100 - 7 * group.rank)


def count_reductions(group):
    calls, real = [], dist.all_reduce
    dist.all_reduce = lambda *a, **k: (calls.append(k.get("op")), real(*a, **k))
    try: return group.min_max(group.rank), len(calls)
    finally: dist.all_reduce = real


def host_beside_stream(group):
    "The host talks while the device's stream is reducing, in another order on each rank"
    stream, seen = Stream("cpu"), []
    def step(i): seen.append(group.all_reduce(torch.full((64,), float(i)))[0].item())
    events = []
    for i in range(30):
        events.append(stream.submit(step, i))
        if group.rank == 0 and i % 3 == 0: time.sleep(0.001)
        assert group.broadcast_object(("host", i) if group.rank == 0 else None) == ("host", i)
    for e in events: e.synchronize(30)
    stream.close()
    return seen


def everything(group): return gather_rows(group), reduce_all(group), talk(group), count_reductions(group), host_beside_stream(group)
def backend_and_threads(group): return dist.get_backend(), torch.get_num_threads(), os.getpid(), group.device.type
def fail_on_one(group):
    if group.rank == 1: raise KeyError("out of pages")
    group.barrier()
def die_on_one(group):
    if group.rank == 1: os._exit(7)
    group.barrier()
def hang(group): time.sleep(600)
def state_of_rank_0(group):
    pid = group.broadcast_object(os.getpid())
    if group.rank == 0: return None
    time.sleep(0.5)
    return open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]
def unpicklable(group): return lambda: None
def add(group, a, b): return a + b + group.rank


@pytest.fixture(scope="module")
def pair(): return run_ranks(everything, 2)


def test_gather_keeps_rows_and_ranks_in_order(pair):
    rows = [[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]]
    for (by_rows, first_dim, transposed), *_ in pair:
        assert by_rows == [rows[:1], rows[:2], rows] and first_dim == [[0, 0], [1, 1]] and transposed == rows[:2]


def test_reduce_sums_in_place(pair):
    for _, sums, *_ in pair: assert sums == {f"torch.{n}": [3.0] for n in ("float32", "float64", "bfloat16", "float16")}


def test_objects_come_from_rank_0(pair):
    for _, _, (obj, ends), *_ in pair: assert obj == {"tokens": [1, 2], "who": 0} and ends == (93, 100)


def test_min_max_is_one_reduction(pair):
    for *_, (ends, calls), _ in pair: assert (ends, calls) == ((0, 1), 1)


def test_the_host_may_talk_while_the_stream_reduces(pair):
    for *_, seen in pair: assert seen == [2.0 * i for i in range(30)]


def test_ranks_use_gloo_share_the_threads_and_end():
    out = run_ranks(backend_and_threads, 2)
    assert [o[0] for o in out] == ["gloo"] * 2 and {o[3] for o in out} == {"cpu"}
    assert {o[1] for o in out} == {max(1, torch.get_num_threads() // 2)}
    for *_, pid, _ in out:
        with pytest.raises(ProcessLookupError): os.kill(pid, 0)
    assert not multiprocessing.active_children()


def test_no_rank_leaves_before_all_are_done():
    assert run_ranks(state_of_rank_0, 2)[1] in "SRD" # asleep or running, not ended


@pytest.mark.parametrize("fn, error, what, timeout", [
    (fail_on_one, RuntimeError, "rank 1 failed: KeyError: 'out of pages'", 60),
    (die_on_one, RuntimeError, "rank 1 failed: its process ended with code 7", 60),
    (unpicklable, RuntimeError, "rank [01] failed: .*pickle", 60),
    (hang, TimeoutError, r"ranks \[0, 1\] gave no result within 8 s", 8)])
def test_a_failure_is_told_and_nobody_is_left(fn, error, what, timeout):
    with pytest.raises(error, match=what): run_ranks(fn, 2, timeout=timeout)
    assert not multiprocessing.active_children()


def test_a_function_that_cannot_be_sent_is_named_at_once():
    def local(group): pass
    for fn, name in ((local, "local"), (lambda g: 1, "<lambda>")):
        with pytest.raises(ValueError, match=f"{name} cannot be sent to another process"): run_ranks(fn, 2)


def test_methods_and_arguments_travel():
    assert run_ranks(add, 2, 3, 4) == [7, 8]
    assert run_ranks(TPGroup.all_reduce, 1, torch.ones(2))[0].tolist() == [1, 1]


def test_one_rank_needs_no_group_and_no_port(monkeypatch):
    "F40"
    def refuse(*a, **k): raise AssertionError("a group of one must not touch torch.distributed or sockets")
    for name in ("init_process_group", "new_group", "all_reduce", "all_gather", "broadcast_object_list", "barrier"): monkeypatch.setattr(dist, name, refuse)
    monkeypatch.setattr(socket, "socket", refuse)
    for group in (single(), init_tp(0, 1, "cpu", "tcp://nowhere:1")):
        t, obj = torch.arange(3.), object()
        assert group.all_reduce(t) is t and group.all_gather(t) is t and group.broadcast_object(obj) is obj
        assert group.min_max(4) == (4, 4) and (group.rank, group.size) == (0, 1)
        group.barrier()
        group.close()
    assert not dist.is_initialized()


def test_a_missing_backend_is_named(monkeypatch):
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(RuntimeError, match="'gloo' backend"): init_tp(0, 2, "cpu", "tcp://127.0.0.1:1")


def test_ranks_are_checked():
    for rank, size in ((2, 2), (-1, 2), (1, 1)):
        with pytest.raises(ValueError, match=f"rank must be >= 0 and < {size}, got {rank}"): init_tp(rank, size, "cpu", "env://")


def test_divide_names_both_numbers():
    assert divide(12, 4, "num_qo_heads") == 3
    with pytest.raises(ValueError, match="num_kv_heads = 3 cannot be divided among 2 ranks"): divide(3, 2, "num_kv_heads")


def test_from_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"): monkeypatch.delenv(name, raising=False)
    assert from_torchrun() is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert from_torchrun().size == 1
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    code = "from minisgl_edu.distributed import from_torchrun; g = from_torchrun(); print(g.size, g.min_max(g.rank)); g.close()"
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": "",
           "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    ranks = [subprocess.Popen([sys.executable, "-c", code], env={**env, "RANK": str(r)}, stdout=subprocess.PIPE, text=True) for r in range(2)]
    try: assert [p.communicate(timeout=60)[0].strip() for p in ranks] == ["2 (0, 1)"] * 2
    finally:
        for p in ranks: p.kill()
