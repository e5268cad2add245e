"Admission, the batches, the plain loop: who runs when, what is refused, and what an end gives back."
import threading

import numpy as np, pytest, torch
from hypothesis import given, strategies as st

from minisgl_edu.core import Batch, PolicyView, Req, RequestError, SamplingParams
from minisgl_edu.engine import Engine, EngineConfig
from minisgl_edu.kvcache import NaivePrefixCache, slots_of
from minisgl_edu.prefill import PrefillManager, promised_pages, total_pages
from minisgl_edu.resources import CacheManager, TableManager
from minisgl_edu.scheduler import DecodeManager, PrefillFirst, Scheduler, admission_arrays, finish_reason, flat_indices, make_policy, step_arrays
from minisgl_edu.overlap import OverlapScheduler
from plugins import PageChainCache


def greedy(max_tokens=8, **kw): return SamplingParams(**(dict(temperature=0.0, max_tokens=max_tokens, ignore_eos=True) | kw))
def prompt_of(length, seed=0): return np.random.default_rng([length, seed]).integers(3, 128, length).tolist()


@pytest.fixture
def make_scheduler(tiny_model_dir):
    "Schedulers over the tiny float64 model; at the end nothing may be held"
    made = []
    def make(cache=None, policy=None, eos=None, **kw):
        config = EngineConfig(**(dict(model=str(tiny_model_dir), dtype="float64", device="cpu", page_size=4, num_pages=64, max_running_requests=8) | kw))
        if cache is not None: config.cache = cache
        if policy is not None: config.policy = policy
        engine = Engine(config)
        if eos is not None: engine.eos_token_ids = eos
        made.append(Scheduler(engine))
        return made[-1]
    yield make
    for s in made:
        s.close()
        s.check_integrity()
        stats = s.stats()
        s.engine.close()
        assert stats["pages_used"] == stats["waiting"] == stats["running"] == 0 and stats["rows_free"] == s.engine.dummy_row, stats


def run(s, check=True, steps=10_000):
    "Step until there is nothing to do; (tokens, finish reason) by uid"
    out = {}
    while s.has_work:
        steps -= 1
        assert steps, f"does not end: {s.stats()}"
        for e in s.step():
            tokens, reason = out.setdefault(e.uid, [[], None])
            assert reason is None, f"an event after the end: {e}"
            if e.token_id is not None: tokens.append(e.token_id)
            out[e.uid][1] = e.finish_reason
        if check: s.check_integrity()
    return {uid: tuple(v) for uid, v in out.items()}


def alone(make, prompt, params, **kw):
    s = make(**kw)
    s.add(0, prompt, params)
    return run(s, check=False)[0]


# ---- at the door

def test_what_can_never_run_is_refused_with_the_numbers(make_scheduler):
    s = make_scheduler()  # context 256, pool of 256 tokens
    for ids, params, param, code, words in [
        ([], greedy(), "prompt", None, "empty"),
        ([1, 128], greedy(), "prompt", None, "token 1 is 128.*127"),
        ([-1], greedy(), "prompt", None, "token 0 is -1"),
        ([1, 2.0], greedy(), "prompt", None, "token 1 is 2.0"),
        ([True], greedy(), "prompt", None, "token 0 is True"),
        (prompt_of(256), greedy(1), "prompt", "context_length_exceeded", "256 tokens.*256"),
        (prompt_of(300), greedy(None), "prompt", "context_length_exceeded", "300 tokens.*256"),
        (prompt_of(200), greedy(57), "max_tokens", None, "57.*200 tokens.*56")]:
        with pytest.raises(RequestError, match=words) as e: s.add(1, ids, params)
        assert (e.value.param, e.value.code) == (param, code)
    assert not s.has_work and s.step() == []
    s.add(1, prompt_of(200), greedy(56))
    s.add(2, np.array(prompt_of(255)), greedy(None))
    with pytest.raises(ValueError, match="uid 1 is in use"): s.add(1, [1], greedy())
    out = run(s)
    assert len(out[1][0]) == 56 and len(out[2][0]) == 1


def test_the_room_left_is_what_none_asks_for(make_scheduler):
    s = make_scheduler(max_seq_len=50)
    s.add(0, prompt_of(20), greedy(None))
    assert len(run(s)[0][0]) == 30


def test_more_than_the_pool_is_refused_and_holds_up_nobody(make_scheduler):  # F13
    s = make_scheduler(num_pages=16)  # 64 tokens; the model could do 256
    with pytest.raises(RequestError, match="100 tokens.*64") as e: s.add(0, prompt_of(100), greedy())
    assert e.value.code == "context_length_exceeded"
    s.add(1, prompt_of(5), greedy())
    assert run(s)[1][1] == "length" and not s.has_work


def test_a_request_as_large_as_the_pool_runs(make_scheduler):
    s = make_scheduler(num_pages=4, max_running_requests=3)  # 16 tokens
    for uid, (n, m) in enumerate([(15, 1), (1, 15), (8, 8), (2, 2)]): s.add(uid, prompt_of(n), greedy(m))
    assert {uid: len(t) for uid, (t, _) in run(s).items()} == {0: 1, 1: 15, 2: 8, 3: 2}


# ---- lengths and ends

@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_token_limit_is_met_exactly(make_scheduler, limit):  # F15
    s = make_scheduler()
    s.add(0, prompt_of(9), greedy(limit))
    tokens, reason = run(s)[0]
    assert len(tokens) == limit and reason == "length" and s.stats()["decode_steps"] == limit - 1


def test_any_end_token_ends_it(make_scheduler):  # F16, F25
    tokens, _ = alone(make_scheduler, prompt_of(9), greedy(8))
    first = next(i for i, t in enumerate(tokens) if t != tokens[0])  # the first token that had not come before
    end = tokens[first]
    for max_tokens in (8, first + 1):  # also as the very last token allowed
        assert alone(make_scheduler, prompt_of(9), greedy(max_tokens, ignore_eos=False), eos=(127 if end != 127 else 126, end)) == (tokens[:first + 1], "stop")
    assert alone(make_scheduler, prompt_of(9), greedy(8), eos=(end,)) == (tokens, "length")


def test_finish_reason():
    r = Req(0, [1, 2], greedy(2, ignore_eos=False))
    r.append_host(7); assert finish_reason(r, frozenset({9})) is None and finish_reason(r, frozenset({7, 9})) == "stop"
    r.append_host(7); assert finish_reason(r, frozenset()) == "length" and finish_reason(r, frozenset({7})) == "stop"


def test_events_name_the_prompt_length(make_scheduler):
    s = make_scheduler()
    s.add(5, prompt_of(9), greedy(2))
    events = s.step() + s.step()
    assert [(e.uid, e.prompt_tokens, e.cached_tokens, e.finish_reason, e.error) for e in events] == [(5, 9, 0, None, None), (5, 9, 0, "length", None)]


# ---- admission

def manager(num_pages=8, page_size=4, rows=4, budget=16, cache=None):
    table = TableManager(rows, torch.zeros(rows + 1, 64, dtype=torch.int32), page_size)
    return PrefillManager(CacheManager(num_pages, page_size, cache or NaivePrefixCache()), table, budget)

def queue(p, *lens):
    for uid, (n, m) in enumerate(lens): p.add(Req(uid, list(range(n)), greedy(m)))
    return p

def uids(batch): return [r.uid for r in batch.reqs] if batch else None


def test_pages_at_the_longest():
    assert [total_pages(Req(0, [1] * n, greedy(m)), 4) for n, m in ((4, 1), (4, 2), (1, 1), (3, 2), (3, 3))] == [1, 2, 1, 1, 2]
    r = Req(0, [1] * 9, greedy(8)); r.pages = [3, 1, 7]
    assert promised_pages([r], 4) == 1


@pytest.mark.parametrize("lens, steps", [
    ([(5, 1), (6, 1), (5, 1), (1, 1)], [[0, 1, 2], [3]]),       # 5 + 6 + 5 = 16 fill the budget
    ([(5, 1), (12, 1), (3, 1)], [[0, 1], [1, 2]]),              # a chunk of 11, and the rest beside the next
    ([(3, 1), (20, 1), (3, 1)], [[0, 1], [1, 2]]),
    ([(20, 1), (3, 1), (16, 1)], [[0], [0, 1, 2], [2]]),
    ([(40, 1), (6, 1), (1, 1)], [[0], [0, 1, 2], [0]])])        # a long prompt leaves half of the budget to those who wait
def test_the_budget_fills_a_step(lens, steps):
    p = queue(manager(num_pages=100), *lens)
    done, computed = [], {}
    while batch := p.schedule([]):
        assert batch.num_tokens <= 16
        done.append(uids(batch))
        for r, span in zip(batch.reqs, batch.spans):
            assert span.cached_len == computed.get(r.uid, 0)
            computed[r.uid] = span.device_len
            assert span.is_chunk == (span.device_len < r.prompt_len)
            r.complete_one()
    assert done == steps and p.num_waiting == 0 and computed == {uid: n for uid, (n, _) in enumerate(lens)}


def test_rows_bound_a_batch():
    p = queue(manager(num_pages=100, rows=2), (1, 1), (1, 1), (1, 1))
    first = p.schedule([])
    assert uids(first) == [0, 1] and p.schedule([]) is None and p.num_waiting == 1
    p.table.free(first.reqs[0].table_idx)
    assert uids(p.schedule([])) == [2]


def test_promises_are_kept():
    p = queue(manager(num_pages=8), (4, 13), (4, 13), (4, 1))  # 4 + 4 pages at their longest, and one more
    batch = p.schedule([])
    assert uids(batch) == [0, 1]
    for r in batch.reqs: p.table.assign(r, p.cache.allocate(1))
    assert p.cache.available_pages == 6 and promised_pages(batch.reqs, 4) == 6
    assert p.schedule(batch.reqs) is None       # six pages are free, and all are promised
    p.cache.release(batch.reqs[0])
    assert uids(p.schedule(batch.reqs[1:])) == [2]


def test_a_refused_head_holds_nothing():
    cache = PageChainCache(8, 4)
    p = manager(num_pages=8, cache=cache)
    p.cache.allocator.allocate(4); p.cache.insert(list(range(8)), [0, 1])
    p.cache.allocator.free([2, 3])
    queue(p, (12, 30))
    assert p.schedule([]) is None and cache.protected_pages == 0 and p.table.num_free == 4 and p.num_waiting == 1
    assert p.abort(99) is None and p.abort(0).uid == 0 and p.num_waiting == 0


def test_a_hit_that_grows_while_it_waits_is_used(make_scheduler):  # F06
    shared = prompt_of(8)
    solo = alone(make_scheduler, shared + prompt_of(4, 1), greedy(5))
    s = make_scheduler(cache=PageChainCache, num_pages=8, max_running_requests=1)
    s.add(0, shared + [9], greedy(12))
    s.add(1, shared + prompt_of(4, 1), greedy(5))
    s.step()
    assert s.stats()["waiting"] == 1   # for the only row
    computed = s.stats()["prefill_tokens"]
    events = []
    while s.has_work:
        events += s.step(); s.check_integrity()
    mine = [e for e in events if e.uid == 1]
    assert ([e.token_id for e in mine], "length") == solo and {e.cached_tokens for e in mine} == {8}
    assert s.stats()["prefill_tokens"] - computed == 12 - 8


def test_the_same_prompt_twice_finds_itself(make_scheduler):  # F04
    for page_size, most in ((1, 7), (4, 4)):
        s = make_scheduler(cache=PageChainCache, page_size=page_size)
        s.add(0, prompt_of(8), greedy(4)); first = run(s)[0]
        s.add(1, prompt_of(8), greedy(4))
        events = s.step()
        assert events[0].cached_tokens == most
        assert ([events[0].token_id] + run(s)[1][0], "length") == first


@pytest.mark.parametrize("loop", [Scheduler, OverlapScheduler])
@pytest.mark.parametrize("max_tokens, ends", [(5, False), (1, False), (5, True)])
def test_equal_prompts_at_once_are_computed_once(make_scheduler, loop, max_tokens, ends):
    "Also in chunks, down to one token, and where the first token is the last; the first computes, the others wait for its pages, and all get what each gets alone"
    params = greedy(max_tokens, ignore_eos=not ends)
    eos = tuple(alone(make_scheduler, prompt_of(18), greedy(1))[0]) if ends else None
    solo = alone(make_scheduler, prompt_of(18), params, eos=eos)
    assert len(solo[0]) == (1 if ends else max_tokens)
    for chunk in (64, 8, 1):
        s = loop(make_scheduler(max_prefill_length=chunk, eos=eos).engine)
        for uid in range(4): s.add(uid, prompt_of(18), params)
        s.add(4, prompt_of(6, 1), params)
        events = []
        while s.has_work: events += s.step(); s.check_integrity()
        news = [[e for e in events if e.uid == uid] for uid in range(4)]
        assert all(([e.token_id for e in each], each[-1].finish_reason) == solo for each in news)
        assert {e.uid: e.cached_tokens for e in events} == {0: 0, 1: 16, 2: 16, 3: 16, 4: 0}
        assert s.stats()["prefill_tokens"] == 18 + 3 * 2 + 6 and s.stats()["pages_used"] == 0


@pytest.mark.parametrize("leave", ["abort", "stop"])
def test_a_double_finds_what_is_launched_for_one_that_left(make_scheduler, leave):
    "Its client has gone, its step is on the device: what that computes is waited for all the same"
    s = OverlapScheduler(make_scheduler().engine)
    for uid in range(2): s.add(uid, prompt_of(12), greedy(3))
    s.step()
    getattr(s, leave)(0)
    assert run(s)[1] == alone(make_scheduler, prompt_of(12), greedy(3))
    assert s.stats()["prefill_tokens"] == 12 + 4


def test_a_double_of_one_that_failed_computes_the_prompt_itself(make_scheduler):
    s = OverlapScheduler(make_scheduler().engine)
    forward = s.engine.forward_batch
    s.engine.forward_batch = lambda ctx, args: 1 / 0
    for uid in range(2): s.add(uid, prompt_of(12), greedy(1))
    s.step(); s.engine.stream.synchronize()
    s.engine.forward_batch = forward
    out = run(s)
    assert out[0] == ([], "error") and out[1] == alone(make_scheduler, prompt_of(12), greedy(1)) and s.stats()["prefill_tokens"] == 24


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_where_nothing_is_kept_equal_prompts_wait_for_nobody(make_scheduler, max_tokens):
    s = make_scheduler(cache="naive")
    for uid in range(4): s.add(uid, prompt_of(9), greedy(max_tokens))
    s.step()
    assert s.stats()["prefill_tokens"] == 36 and set(run(s)) <= set(range(4))


def test_a_double_does_not_wait_for_one_that_left(make_scheduler):
    s = make_scheduler(max_prefill_length=4)
    for uid in range(2): s.add(uid, prompt_of(12), greedy(3))
    s.step()
    assert s.stats()["waiting"] == 1
    s.abort(0)
    assert run(s)[1] == alone(make_scheduler, prompt_of(12), greedy(3))


# ---- indices

@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.integers(0, 7)), max_size=8))
def test_flat_indices_are_those_of_a_loop(ranges):
    rows, starts, lens = (np.array([r[i] for r in ranges], dtype=np.int64) for i in range(3))
    index, positions = flat_indices(rows, starts, starts + lens, 20)
    assert index.tolist() == [row * 20 + p for row, start, n in ranges for p in range(start, start + n)]
    assert positions.tolist() == [p for _, start, n in ranges for p in range(start, start + n)]


def test_the_articles_example():
    index, _ = flat_indices(np.array([0, 2]), np.array([1, 0]), np.array([3, 2]), 4)
    assert index.tolist() == [1, 2, 8, 9]


def test_arrays_of_a_step():
    table = TableManager(4, torch.zeros(5, 32, dtype=torch.int32), 4)
    reqs = [Req(0, list(range(10, 17)), greedy(4)), Req(1, [20, 21, 22], greedy(4)), Req(2, list(range(30, 40)), greedy(4))]
    for r, row, pages, cached, n in zip(reqs, (2, 0, 3), ([5, 1], [3], [0, 2]), (4, 0, 0), (3, 3, 6)):
        r.table_idx, r.cached_len, r.is_fresh = row, cached, True
        table.assign(r, pages); r.schedule(n)
    batch = Batch(reqs, "prefill")  # a hit of 4, a whole prompt, a first chunk of 6
    a = step_arrays(batch, table)
    assert a["rows"].tolist() == [2, 0, 3] and a["last"].tolist() == [2, 5, 11]
    assert a["positions"].tolist() == [4, 5, 6, 0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert a["load"].tolist() == [68, 69, 70, 0, 1, 2, 96, 97, 98, 99, 100, 101]
    assert a["out_loc"].tolist() == [4, 5, 6, 12, 13, 14, 0, 1, 2, 3, 8, 9]
    assert a["write"].tolist() == [64 + 7, 3, 4 * 32]  # a chunk's token goes to the row that is nobody's
    b = admission_arrays(batch, table)
    assert b["prompt_at"].tolist() == [*range(64, 71), *range(3), *range(96, 106)] and b["prompt_ids"].tolist() == [t for r in reqs for t in r.input_ids]
    assert b["hit_at"].tolist() == [64, 65, 66, 67] and b["hit_slots"].tolist() == slots_of([5, 1], 4, 0, 4).tolist()
    for r in reqs: r.complete_one(); r.is_fresh = False
    reqs[2].schedule(4)
    later = admission_arrays(Batch(reqs[2:], "prefill"), table)  # the rest of the chunk: its row is filled already
    assert all(len(x) == 0 for x in later.values())


# ---- fairness

def test_prefill_first():
    order = PrefillFirst(max_streak=8).order
    assert order(PolicyView(3, 2, 7, 0)) == ("prefill", "decode") and order(PolicyView(3, 2, 8, 0)) == ("decode", "prefill")


def test_arrivals_do_not_starve_a_running_request(make_scheduler):  # F14
    s = make_scheduler(max_prefill_length=32, max_running_requests=16)
    s.add(0, prompt_of(5), greedy(16))
    s.step()
    phases, done = [], None
    for i in range(1, 201):
        s.add(i, prompt_of(32, i % 7), greedy(1 + i % 2))
        if any(e.uid == 0 and e.finish_reason for e in s.step()): done = i; break
        phases.append(s.last_batch.phase)
    assert done is not None, "still decoding after 200 arrivals"
    streaks = "".join("d" if p == "decode" else "p" for p in phases).split("d")
    assert max(map(len, streaks)) <= 8 and len(streaks) > 10
    run(s, check=False)


def test_waiting_prompts_are_served_in_turn(make_scheduler):
    s = make_scheduler(max_running_requests=2, max_prefill_length=8)
    for i in range(6): s.add(i, prompt_of(6, i), greedy(3))
    first = {}
    while s.has_work:
        for e in s.step(): first.setdefault(e.uid, s.stats()["steps"])
    assert sorted(first, key=first.get) == list(range(6))


@pytest.mark.parametrize("order", [(), ("decode",), ("prefill",), ("decode", "prefill", "decode")])
def test_a_policy_may_choose_but_not_stand_still(make_scheduler, order):
    class Mine:
        def order(self, view): return order
    s = make_scheduler(policy=Mine())
    for i in range(12): s.add(i, prompt_of(5, i), greedy(4))
    assert all(reason == "length" for _, reason in run(s).values())


def test_a_policy_by_name_or_object(make_scheduler):
    assert isinstance(make_policy("prefill-first"), PrefillFirst)
    with pytest.raises(ValueError, match="'fifo'"): make_policy("fifo")
    class Odd:
        def order(self, view): return ("train",)
    s = make_scheduler(policy=Odd()); s.add(0, [1], greedy())
    with pytest.raises(ValueError, match="'train'"): s.step()


def test_streaks_as_the_policy_sees_them(make_scheduler):
    views = []
    class Spy:
        def order(self, view): views.append(view); return PrefillFirst(2).order(view)
    s = make_scheduler(policy=Spy(), max_prefill_length=4)
    for i in range(5): s.add(i, prompt_of(4, i), greedy(3))
    run(s)
    assert views[:7] == [PolicyView(5, 0, 0, 0), PolicyView(4, 1, 0, 0), PolicyView(3, 2, 1, 0), PolicyView(2, 3, 2, 0), PolicyView(2, 3, 0, 1),
                         PolicyView(1, 4, 1, 0), PolicyView(0, 5, 2, 0)]


# ---- abort, stop, errors

def test_abort_while_waiting_and_while_running(make_scheduler):
    s = make_scheduler(max_running_requests=1)
    for uid in range(3): s.add(uid, prompt_of(6, uid), greedy(6))
    s.step()
    s.abort(0); s.abort(1); s.abort(77)
    assert s.has_work and s.stats()["pages_used"] == 0  # nothing was launched: given back at once
    s.abort(0)
    events = s.step()
    assert [(e.uid, e.finish_reason, e.token_id) for e in events[:2]] == [(0, "abort", None), (1, "abort", None)] and events[2].uid == 2
    assert run(s)[2][1] == "length" and s.stats()["ended_abort"] == 2


def test_stop_is_silent(make_scheduler):
    s = make_scheduler()
    s.add(0, prompt_of(6), greedy(6)); s.add(1, prompt_of(7), greedy(6)); s.step()
    s.stop(0); s.stop(0)
    assert [e.uid for e in s.step()] == [1]
    s.stop(1)
    assert not s.has_work and s.step() == []


def test_an_abort_under_a_launched_batch_waits_for_it(make_scheduler):  # F11
    solo = {i: alone(make_scheduler, prompt_of(6, i), greedy(6)) for i in (1, 2)}
    s = make_scheduler(max_running_requests=2)
    s.add(0, prompt_of(6), greedy(2)); s.step()
    plan = s._schedule(); s._launch(plan)   # its last token
    held = list(plan.batch.reqs[0].pages)
    s.abort(0)
    assert s.stats()["rows_free"] == 1 and set(held).isdisjoint(s.cache.allocator.free_pages)
    s.check_integrity()
    events = s.step()
    assert [(e.uid, e.finish_reason) for e in events] == [(0, "abort")] and s.stats()["rows_free"] == 2 and s.stats()["pages_used"] == 0
    s.add(1, prompt_of(6, 1), greedy(6)); s.add(2, prompt_of(6, 2), greedy(6)); s.step()
    assert len({r.table_idx for r in s.holders()}) == 2
    rest = run(s)
    assert rest[1][0] == solo[1][0][1:] and rest[2][0] == solo[2][0][1:]


def test_a_uid_may_come_back_while_its_old_batch_runs(make_scheduler):
    solo = alone(make_scheduler, prompt_of(6, 1), greedy(4))
    s = make_scheduler()
    s.add(0, prompt_of(6), greedy(4)); s.step()
    s._launch(s._schedule()); s.stop(0); s.add(0, prompt_of(6, 1), greedy(4))
    assert run(s)[0] == solo


def test_an_error_in_the_forward_ends_its_batch_only(make_scheduler):
    for cache in ("naive", PageChainCache):
        s = make_scheduler(cache=cache, max_prefill_length=8)
        solo = alone(make_scheduler, prompt_of(9, 9), greedy(4))
        good, s.engine.forward_batch = s.engine.forward_batch, None
        def fail(ctx, args): raise RuntimeError("the device is on fire")
        for uid in range(2): s.add(uid, prompt_of(4, uid), greedy(4))
        s.add(9, prompt_of(9, 9), greedy(4))
        s.engine.forward_batch = fail
        events = s.step()
        assert [(e.uid, e.finish_reason, e.token_id) for e in events] == [(0, "error", None), (1, "error", None)]
        assert all("on fire" in str(e.error) for e in events)
        s.check_integrity()
        assert s.stats()["pages_free"] == 64   # KV that was never written is not kept
        s.engine.forward_batch = good
        assert run(s) == {9: solo}
        s.add(3, prompt_of(9, 3), greedy(4)); s.add(4, prompt_of(5, 3), greedy(4)); s.step()
        s.engine.forward_batch = fail
        assert {r for _, r in run(s).values()} == {"error"}
        s.engine.forward_batch = good
        s.add(9, prompt_of(9, 9), greedy(4))
        assert run(s) == {9: solo}


@pytest.mark.parametrize("Kind", [Scheduler, OverlapScheduler])
@pytest.mark.parametrize("method", ["insert", "unlock"])
def test_a_cache_that_fails_while_a_request_leaves_is_asked_once(make_scheduler, Kind, method):
    "The failure comes out of that step; the others that leave with it lose nothing, and later requests run"
    solo = [alone(make_scheduler, prompt_of(6, uid), greedy(7)) for uid in range(3)]
    s = make_scheduler(cache=PageChainCache)
    s = Kind(s.engine)
    for uid in range(3): s.add(uid, prompt_of(6, uid), greedy(7))
    real, calls = s.cache.release, []
    def release(req):
        calls.append(req.uid)
        broken = getattr(s.cache.prefix_cache, method)
        def fail(*args): raise ZeroDivisionError(method)
        if req.uid == 1: setattr(s.cache.prefix_cache, method, fail)
        try: real(req)
        finally: setattr(s.cache.prefix_cache, method, broken)
    s.cache.release, out = release, {}
    with pytest.raises(ZeroDivisionError, match=method):
        while True:
            for e in s.step(): out.setdefault(e.uid, []).append(e.token_id)
    while s.has_work:
        for e in s.step(): out.setdefault(e.uid, []).append(e.token_id)
    assert sorted(calls) == [0, 1, 2] and s.ledger.leaving == [] and s.table.num_free == s.engine.dummy_row
    assert [out[uid] for uid in range(3)] == [tokens for tokens, _ in solo]
    s.add(3, prompt_of(6, 2), greedy(7))
    assert run(s, check=False)[3] == solo[2]


def test_a_scheduler_that_cannot_go_on_says_so(make_scheduler):
    s = make_scheduler()
    pages = s.cache.allocate(64)  # somebody else's
    s.add(0, prompt_of(3), greedy())
    with pytest.raises(RuntimeError, match="no request can run.*'waiting': 1"): s.step()
    s.cache.allocator.free(pages)
    assert run(s)[0][1] == "length"


def test_an_interrupted_wait_loses_nothing(make_scheduler, monkeypatch):
    solo = alone(make_scheduler, prompt_of(6), greedy(5))
    s = make_scheduler()
    s.add(0, prompt_of(6), greedy(5))
    step = s._process
    def interrupted(plan): raise KeyboardInterrupt
    monkeypatch.setattr(s, "_process", interrupted)
    with pytest.raises(KeyboardInterrupt): s.step()
    monkeypatch.setattr(s, "_process", step)
    assert run(s)[0] == solo


# ---- the pieces make other loops

def overlapped(s):
    "The next batch is launched before the last one's tokens are looked at"
    out, last = {}, None
    while s.has_work:
        plan = s._schedule()
        if plan: s._launch(plan)
        for e in s._process(last) if last else s.ledger.take_events():
            tokens, reason = out.setdefault(e.uid, ([], None))
            assert reason is None
            out[e.uid] = (tokens + [e.token_id], e.finish_reason)
        last = plan
        s.check_integrity()
    return out


@pytest.mark.parametrize("cache", ["naive", PageChainCache])
def test_launching_ahead_changes_no_token(make_scheduler, cache):
    work = [(prompt_of(1 + 5 * i % 23, i % 6), greedy(1 + i % 9, ignore_eos=i % 3 > 0)) for i in range(24)]
    results = []
    for loop in (run, overlapped):
        s = make_scheduler(cache=cache, num_pages=24, eos=tuple(range(0, 128, 5)))
        for uid, (p, params) in enumerate(work): s.add(uid, p, params)
        results.append(loop(s))
    assert results[0] == results[1] and {"stop", "length"} == {r for _, r in results[0].values()}


def test_a_prepared_step_stays_as_it_was(make_scheduler):  # F09
    "The device takes its arrays only after the next step has been prepared"
    work = [(prompt_of(1 + i, i), greedy(6)) for i in range(16)]
    plain, late = (make_scheduler(max_running_requests=16) for _ in range(2))
    for s in (plain, late):
        for uid, (p, params) in enumerate(work): s.add(uid, p, params)
    want, got = run(plain), {}
    while late.has_work:
        gate = threading.Event()
        late.engine.stream.submit(gate.wait, 30)
        plans = []
        for _ in range(2):
            if (plan := late._schedule()): late._launch(plan); plans.append((plan, {k: v.copy() for k, v in plan.arrays.items()}))
        gate.set()
        for plan, before in plans:
            for e in late._process(plan): got.setdefault(e.uid, []).append(e.token_id)
            assert all((plan.arrays[k] == v).all() for k, v in before.items())
    assert got == {uid: tokens for uid, (tokens, _) in want.items()}


def test_a_seed_fixes_the_draws(make_scheduler):
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=7, ignore_eos=True)
    solo = alone(make_scheduler, prompt_of(6), params)
    s = make_scheduler()
    for uid in range(4): s.add(uid, prompt_of(6 + uid, uid if uid else 0), params if uid != 2 else greedy(5))
    assert run(s)[0] == solo
    s = make_scheduler()
    for uid in range(8): s.add(uid, prompt_of(6), SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True))
    assert len({tuple(t) for t, _ in run(s).values()}) > 1  # without one, each draws its own


def test_stats_count(make_scheduler):
    s = make_scheduler(cache="naive")
    assert s.stats()["pages_free"] == s.stats()["pages_total"] == 64 and s.stats()["batch_size"] == 0
    s.add(0, prompt_of(9), greedy(3)); s.add(1, prompt_of(4), greedy(3))
    assert s.stats()["waiting"] == 2
    s.step()
    stats = s.stats()
    assert (stats["waiting"], stats["running"], stats["pages_used"], stats["batch_size"], stats["rows_free"]) == (0, 2, 4, 2, 6)
    run(s)
    stats = s.stats()
    assert (stats["steps"], stats["prefill_steps"], stats["decode_steps"], stats["prefill_tokens"], stats["decode_tokens"], stats["ended_length"]) == (3, 1, 2, 13, 4, 2)


def test_decode_leaves_out_who_only_waits_for_its_last_token():
    d = DecodeManager()
    a, b = Req(0, [1, 2], greedy(3)), Req(1, [1, 2], greedy(1))
    for r in (a, b): r.schedule(2); r.complete_one(); d.add(r)
    assert uids(d.schedule()) == [0]
    d.remove(a); d.remove(a)
    assert d.schedule() is None


@pytest.mark.parametrize("leave", ["abort", "stop"])
def test_nothing_of_a_step_that_went_wrong_is_cached_when_its_client_has_gone(make_scheduler, leave):
    "A prompt whose step gave NaN, and whose request ended meanwhile, poisons no later request"
    s = make_scheduler(page_size=1, num_pages=64, cache="radix", disable_overlap=False)
    prompt, real = prompt_of(12), s.engine.model.embedding.forward
    s.engine.model.embedding.forward = lambda ids: real(ids) * float("nan")  # one step of the device goes wrong
    s.add(0, prompt, greedy(4))
    plan = s._schedule()
    s._launch(plan)
    plan.event.synchronize()
    s.engine.model.embedding.forward = real
    getattr(s, leave)(0)
    while s.has_work: s.step()
    assert s.cache.cached_pages == 0
    s.add(1, prompt, greedy(4))
    events = []
    while s.has_work: events += s.step()
    assert events[-1].finish_reason == "length" and events[-1].cached_tokens == 0
