"Streams, events, timers and the cost model"
import gc
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from minisgl_edu import device as dv
from minisgl_edu.device import (Ceilings, OpCost, Stream, Timing, bound_by, kv_bytes_per_token, measure, measure_ceilings,
                                measure_interleaved, memory_free, pick_device, roofline_ms, step_costs, weight_bytes)

TINY = SimpleNamespace(vocab_size=10, hidden_size=4, intermediate_size=6, num_layers=2, num_qo_heads=2, num_kv_heads=1, head_dim=2,
                       tie_embeddings=True, attention_bias=False, qk_norm=False)


@pytest.fixture
def stream():
    s = Stream("cpu", "test")
    yield s
    s.close()


# streams and events

def test_submissions_run_in_order_on_one_other_thread(stream):
    seen = []
    for i in range(100): event = stream.submit(lambda i: seen.append((i, threading.get_ident())), i)
    event.synchronize(10)
    assert [i for i, _ in seen] == list(range(100))
    assert {t for _, t in seen} == {stream._thread.ident} != {threading.get_ident()}


def test_submit_returns_before_the_work_is_done(stream):
    gate = threading.Event()
    event = stream.submit(gate.wait, 30)
    assert not event.query() and event.done_at is None
    with pytest.raises(TimeoutError): event.synchronize(0.01)
    gate.set()
    event.synchronize(10)
    assert event.query()
    event.synchronize() # again, at once


def test_work_runs_under_inference_mode(stream):
    box = []
    stream.submit(lambda: box.append((torch.is_inference_mode_enabled(), torch.ones(2, requires_grad=True) * 2))).synchronize(10)
    assert box[0][0] and not box[0][1].requires_grad and not torch.is_inference_mode_enabled()


def test_an_error_stays_with_its_event(stream):
    def fail(): raise ZeroDivisionError("mine")
    bad, seen = stream.submit(fail), []
    good = stream.submit(seen.append, 1)
    good.synchronize(10)
    stream.synchronize() # does not raise: the error belongs to whoever holds the event
    assert seen == [1] and bad.query()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="mine"): bad.synchronize(10)


def test_exit_in_a_submission_does_not_end_the_stream(stream):
    with pytest.raises(SystemExit): stream.submit(sys.exit, 3).synchronize(10)
    stream.submit(int).synchronize(10)


def test_call_gives_the_result_or_the_error(stream):
    where = stream.call(lambda a, b: (threading.current_thread().name, torch.is_inference_mode_enabled(), a + b), 2, 3)
    assert where == (stream.name, True, 5)
    with pytest.raises(ZeroDivisionError): stream.call(lambda: 1 / 0)
    assert stream.call(len, "still there") == 11


def test_wait_holds_back_later_submissions_only(stream):
    other, gate, seen = Stream("cpu"), threading.Event(), []
    slow = other.submit(gate.wait, 30)
    stream.submit(seen.append, "before").synchronize(10)
    stream.wait(slow) # the caller goes on
    after = stream.submit(seen.append, "after")
    with pytest.raises(TimeoutError): after.synchronize(0.05)
    assert seen == ["before"]
    gate.set()
    after.synchronize(10)
    assert seen == ["before", "after"] and slow.query()
    other.close()


def test_waiting_for_a_failed_event_is_no_failure(stream):
    other = Stream("cpu")
    bad = other.submit(lambda: 1 / 0)
    stream.wait(bad)
    stream.submit(int).synchronize(10)
    with pytest.raises(ZeroDivisionError): bad.synchronize(10)
    other.close()


def test_several_threads_may_wait_for_one_event(stream):
    gate, woken = threading.Event(), []
    event = stream.submit(gate.wait, 30)
    waiters = [threading.Thread(target=lambda: (event.synchronize(10), woken.append(1))) for _ in range(4)]
    for w in waiters: w.start()
    gate.set()
    for w in waiters: w.join(10)
    assert woken == [1] * 4


def test_elapsed_is_the_time_between_two_events(stream):
    first, second = stream.submit(int), stream.submit(time.sleep, 0.03)
    second.synchronize(10)
    assert first.elapsed(second) >= 30 > -1 >= -30 >= second.elapsed(first)
    gate = threading.Event()
    pending = stream.submit(gate.wait, 30)
    with pytest.raises(RuntimeError, match="synchronize"): first.elapsed(pending)
    gate.set()


def test_close_finishes_what_was_submitted():
    s, seen = Stream("cpu", "closing"), []
    for i in range(50): s.submit(seen.append, i)
    s.close()
    assert seen == list(range(50)) and not s._thread.is_alive()
    s.close()
    for use in (lambda: s.submit(int), s.synchronize):
        with pytest.raises(RuntimeError, match="closing is closed"): use()


def test_a_forgotten_stream_ends_its_thread():
    s = Stream("cpu")
    thread, event = s._thread, s.submit(int)
    del s
    gc.collect()
    thread.join(10)
    assert not thread.is_alive() and event.query()


def test_an_idle_stream_keeps_nothing_alive(stream):
    class Big: pass
    big = Big()
    ref = weakref.ref(big)
    stream.submit(lambda x: None, big).synchronize(10)
    stream.submit(int).synchronize(10) # the first submission is behind us for sure
    del big
    gc.collect()
    assert ref() is None


def test_the_thread_count_follows_the_submitter(stream):
    before, seen = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            stream.submit(lambda: seen.append(torch.get_num_threads())).synchronize(10)
    finally: torch.set_num_threads(before)
    assert seen == [1, 2]


def test_two_streams_are_two_timelines():
    a, b, meet = Stream("cpu"), Stream("cpu"), threading.Barrier(2)
    ea, eb = a.submit(meet.wait, 30), b.submit(meet.wait, 30) # only parallel streams pass the barrier
    ea.synchronize(10)
    eb.synchronize(10)
    a.close()
    b.close()


def test_cuda_stream_order_of_calls(monkeypatch):
    "Without a GPU: `fn` runs inside the stream's context, and the event is recorded after it, also when it fails"
    log = []
    class FakeEvent:
        def __init__(self, enable_timing): self.at = None
        def record(self, s): self.at = len(log); log.append("record")
        def query(self): return self.at is not None
        def synchronize(self): log.append("synchronize")
        def elapsed_time(self, other): return float(other.at - self.at)
    class FakeStream:
        def __init__(self, device): pass
        def wait_event(self, e): log.append("wait")
        def synchronize(self): log.append("drain")
    @contextmanager
    def context(s):
        log.append("enter")
        yield
        log.append("leave")
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", context)
    s = Stream("cuda", "gpu")
    assert isinstance(s, dv.CudaStream)
    log.clear()
    e = s.submit(lambda: log.append(("fn", torch.is_inference_mode_enabled())))
    assert log == ["enter", ("fn", True), "record", "leave"]
    e.synchronize()
    bad = s.submit(lambda: 1 / 0)
    s.wait(e)
    with pytest.raises(ZeroDivisionError): bad.synchronize(1)
    assert e.elapsed(bad) > 0 and bad.done_at > e.done_at
    s.close()
    assert log[-1] == "drain"
    with pytest.raises(RuntimeError, match="gpu is closed"): s.submit(int)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_streams():
    s, other, seen = Stream("cuda"), Stream("cuda"), []
    x = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    first = s.submit(lambda: [x.add_(1) for _ in range(100)])
    other.wait(first)
    last = other.submit(lambda: seen.append(x.sum()))
    last.synchronize(60)
    assert seen[0].item() == 100 * (1 << 20) and first.query() and first.elapsed(last) >= 0 and last.done_at >= first.done_at
    bad = s.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError): bad.synchronize()
    s.close()
    other.close()


# devices

def test_pick_device():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    for bad in ("tpu", "mps", "meta", "gpu"):
        with pytest.raises(ValueError, match=bad): pick_device(bad)
    with pytest.raises(ValueError, match=r"'cuda:99' is not available"): pick_device("cuda:99")


def test_memory_free_is_a_part_of_all_memory():
    total = next(int(l.split()[1]) * 1024 for l in open("/proc/meminfo") if l.startswith("MemTotal"))
    assert 0 < memory_free("cpu") < total


# timers

def test_interleaved_takes_turns():
    calls = []
    t = measure_interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warmup=2)
    assert calls == ["a", "b"] * 5 and t["a"].repeats == 3 and set(t) == {"a", "b"}


def test_timing_is_median_and_quartiles(monkeypatch):
    times = iter([99.0, 98.0, 4.0, 1.0, 100.0, 3.0, 2.0])
    monkeypatch.setattr(dv, "time_once", lambda fn, device: next(times))
    assert measure(lambda: None, repeats=5, warmup=2) == Timing(3.0, 2.0, 4.0, 5)


def test_one_repeat_has_no_spread():
    t = measure(lambda: None, repeats=1, warmup=0)
    assert t.low_ms == t.median_ms == t.high_ms >= 0


# cost model

def cost(costs, name): return next(c for c in costs if c.name == name)


def test_step_costs_by_hand():
    "One request decodes its 6th token (5 cached), another prefills 3"
    costs = step_costs(TINY, [(5, 6), (0, 3)], torch.float32)
    assert [c.name for c in costs] == ["embedding", "qkv", "attention", "o", "gate_up", "down", "pointwise", "lm_head"]
    # 4 rows; qkv: 4 -> (2 + 1 + 1) heads of 2 = 8; two layers; 4 bytes a number
    assert cost(costs, "embedding") == OpCost("embedding", 2 * 4 * 4 * 4, 0)
    assert cost(costs, "qkv") == OpCost("qkv", 2 * (4*8 + 4*(4 + 8)) * 4, 2 * 2*4*4*8)
    assert cost(costs, "o") == OpCost("o", 2 * (4*4 + 4*(4 + 4)) * 4, 2 * 2*4*4*4)
    assert cost(costs, "gate_up") == OpCost("gate_up", 2 * (4*12 + 4*(4 + 12)) * 4, 2 * 2*4*4*12)
    assert cost(costs, "down") == OpCost("down", 2 * (6*4 + 4*(6 + 4)) * 4, 2 * 2*4*6*4)
    assert cost(costs, "lm_head") == OpCost("lm_head", (4*10 + 2*(4 + 10)) * 4, 2*2*4*10) # 2 last tokens
    # the decoded query meets 6 keys, the three prefilled ones 1 + 2 + 3; a pair costs 2 dot products of 2, for 2 heads
    # k and v: 6 + 3 tokens read, 4 written, one head of 2; q and output: 4 rows of 2 heads of 2
    assert cost(costs, "attention") == OpCost("attention", 2 * (2*2*(9 + 4) + 2*4*4) * 4, 2 * 2*2*2*2 * (6 + 6))


def test_attention_pairs_equal_a_loop():
    for spans in ([(0, 7)], [(3, 9), (8, 9)], [(0, 1), (5, 6), (2, 11)]):
        pairs = sum(p + 1 for c, d in spans for p in range(c, d))
        assert cost(step_costs(TINY, spans, torch.float32), "attention").flops == TINY.num_layers * 4 * 2 * 2 * pairs


def test_tensor_parallel_costs_are_one_ranks():
    big = SimpleNamespace(**{**vars(TINY), "num_qo_heads": 4, "num_kv_heads": 2, "intermediate_size": 8})
    one, two = (step_costs(big, [(9, 10)] * 3, torch.float32, tp) for tp in (1, 2))
    for name in ("qkv", "attention", "o", "gate_up", "down", "lm_head"): assert cost(one, name).flops == 2 * cost(two, name).flops
    assert kv_bytes_per_token(big, torch.float32) == 2 * kv_bytes_per_token(big, torch.float32, tp=2) == 2 * 2 * 2 * 2 * 4


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_against_transformers(tied):
    from transformers import LlamaConfig, LlamaForCausalLM
    hf = LlamaConfig(vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
                     head_dim=4, tie_word_embeddings=tied)
    with torch.device("meta"): model = LlamaForCausalLM(hf)
    config = SimpleNamespace(vocab_size=50, hidden_size=24, intermediate_size=40, num_layers=3, num_qo_heads=6, num_kv_heads=2, head_dim=4,
                             tie_embeddings=tied, attention_bias=False, qk_norm=False)
    assert weight_bytes(config, torch.bfloat16) == 2 * sum(p.numel() for p in model.parameters())
    # every weight is read once a step: the linear layers' bytes at one row contain the matrices exactly
    linears = [c for c in step_costs(config, [(0, 1)], torch.bfloat16) if c.name in ("qkv", "o", "gate_up", "down", "lm_head")]
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert sum(c.flops for c in linears) == 2 * matrices


def test_biases_and_qk_norm_count():
    more = SimpleNamespace(**{**vars(TINY), "attention_bias": True, "qk_norm": True})
    assert weight_bytes(more, torch.float32) - weight_bytes(TINY, torch.float32) == 2 * (8 + 2*2) * 4


def test_roofline_takes_the_longer_of_the_two():
    ceilings = Ceilings(read_gb_s=10, copy_gb_s=8, matmul_tflop_s=0.5, launch_us=1, device="cpu", dtype=torch.float32)
    memory, compute = OpCost("memory", 10**9, 10**9), OpCost("compute", 10**7, 10**12)
    assert roofline_ms([memory], ceilings) == pytest.approx(100)   # 1 GB at 10 GB/s; its FLOPs would take 2 ms
    assert roofline_ms([compute], ceilings) == pytest.approx(2000) # 1 TFLOP at half a TFLOP/s
    assert roofline_ms([memory, compute], ceilings) == pytest.approx(2100)
    shares = bound_by([memory, compute], ceilings)
    assert shares["memory"] == pytest.approx(100 / 2100) and sum(shares.values()) == pytest.approx(1)


def test_more_work_never_gets_cheaper():
    ceilings = Ceilings(10, 8, 0.5, 1, "cpu", torch.float32)
    times = [roofline_ms(step_costs(TINY, [(20, 21)] * b, torch.float32), ceilings) for b in range(1, 60)]
    assert times == sorted(times)
    longer = [roofline_ms(step_costs(TINY, [(n, n + 1)], torch.float32), ceilings) for n in range(60)]
    assert longer == sorted(longer)


def test_ceilings_leave_no_parallel_work_to_the_caller(monkeypatch):
    "OpenMP keeps workers for every thread that has run parallel work; those of a thread that has ended are gone"
    monkeypatch.setattr(dv, "_ceilings", {})
    mine, threads = threading.current_thread(), []
    best = dv._best_ms
    monkeypatch.setattr(dv, "_best_ms", lambda *a: (threads.append(threading.current_thread()), best(*a))[1])
    measure_ceilings("cpu", torch.float32, quick=True)
    assert threads and mine not in threads and not any(t.is_alive() for t in threads)


def test_ceilings_are_measured_once_and_positive():
    a = measure_ceilings("cpu", torch.float32, quick=True)
    assert measure_ceilings("cpu", torch.float32, quick=True) is a
    assert min(a.read_gb_s, a.copy_gb_s, a.matmul_tflop_s, a.launch_us) > 0 and (a.device, a.dtype) == ("cpu", torch.float32)
