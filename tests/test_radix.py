"""The radix prefix cache: what it finds, what it protects, what it gives up, and that its counters never disagree with the tree."""
import random

import pytest

from minisgl_edu.core import PrefixCache, SamplingParams
from minisgl_edu.radix import RadixCache, common_len
from minisgl_edu.resources import CacheManager, make_prefix_cache


def counts(cache): return cache.evictable_pages, cache.protected_pages


def test_it_speaks_the_protocol():
    assert isinstance(RadixCache(8, 2), PrefixCache) and isinstance(make_prefix_cache("auto", 8, 2), RadixCache)
    assert isinstance(make_prefix_cache("radix", 8, 2), RadixCache)


def test_a_lock_protects_the_whole_path_once_per_holder():  # F02
    c = RadixCache(32, 1)
    assert c.insert([1, 2, 3, 4], [10, 11, 12, 13]) == []
    assert c.insert(list(range(1, 9)), [10, 11, 12, 13, 14, 15, 16, 17]) == []
    m = c.match_prefix(list(range(1, 9)))
    assert m.pages == list(range(10, 18)) and m.num_tokens == 8 and counts(c) == (8, 0)
    c.lock(m.handle); assert counts(c) == (0, 8)
    c.lock(m.handle); assert counts(c) == (0, 8)
    assert c.evict(100) == []
    c.unlock(m.handle); assert counts(c) == (0, 8) and c.evict(100) == []
    assert c.match_prefix(list(range(1, 9))).pages == m.pages
    c.unlock(m.handle); assert counts(c) == (8, 0)
    assert sorted(c.evict(100)) == m.pages
    c.check_integrity()
    with pytest.raises(ValueError, match="unlocked"): c.unlock(m.handle)


def test_counters_agree_when_a_locked_node_is_split():  # F03
    c = RadixCache(32, 1)
    c.insert(list(range(1, 9)), list(range(8)))
    m = c.match_prefix(list(range(1, 9)))
    c.lock(m.handle)
    c.insert([1, 2, 3, 4, 20, 21], [0, 1, 2, 3, 8, 9])
    c.check_integrity(); assert counts(c) == (2, 8)
    c.unlock(m.handle)
    c.check_integrity(); assert counts(c) == (10, 0)
    other = c.match_prefix([1, 2, 3, 4, 20, 21])
    c.lock(other.handle); c.check_integrity(); assert counts(c) == (4, 6)
    c.unlock(other.handle)
    assert sorted(c.evict(10)) == list(range(10)) and counts(c) == (0, 0)
    c.check_integrity()


def test_a_match_inside_a_node_protects_no_more_than_the_match():
    c = RadixCache(8, 2)
    c.insert(list(range(8)), [0, 1, 2, 3])
    m = c.match_prefix([0, 1, 2, 3, 9, 9])
    c.lock(m.handle)
    assert m.pages == [0, 1] and counts(c) == (2, 2)
    assert sorted(c.evict(9)) == [2, 3] and c.match_prefix(list(range(8))).pages == [0, 1]


def test_eviction_and_allocation_count_in_pages():  # F05
    m = CacheManager(8, 4, RadixCache(8, 4))
    pages = m.allocate(4)
    assert m.insert(list(range(16)), pages) == [] and m.available_pages == 8
    got = m.allocate(6)
    assert len(set(got)) == 6 and m.cached_pages == 2 and m.allocator.num_free == 0
    m.allocator.check_integrity([*got, *m.prefix_cache.match_prefix(list(range(16))).pages])


def test_the_least_recently_used_leaf_goes_first():
    c = RadixCache(16, 1)
    c.insert([1, 2, 3], [0, 1, 2]); c.insert([1, 2, 4], [0, 1, 3]); c.insert([7, 8], [4, 5])
    c.match_prefix([1, 2, 3])
    assert c.evict(1) == [3] and c.evict(2) == [4, 5] and c.evict(1) == [2] and c.evict(9) == [0, 1] and c.evict(1) == []


def test_only_whole_pages_are_found():
    c = RadixCache(16, 4)
    c.insert(list(range(8)), [0, 1])
    assert [c.match_prefix(list(range(n))).num_tokens for n in (0, 3, 4, 7, 8, 20)] == [0, 0, 4, 4, 8, 8]
    with pytest.raises(ValueError, match="2 pages of 4"): c.insert(list(range(9)), [0, 1])


def test_common_len_is_that_of_a_loop():
    rng = random.Random(0)
    for _ in range(2000):
        size, start = rng.randint(1, 4), rng.randint(0, 3)
        run = [rng.randint(0, 1) for _ in range(size * rng.randint(1, 6))]
        ids = [7] * start + run[:rng.randint(0, len(run))] + [rng.randint(0, 1) for _ in range(rng.randint(0, 5))]
        same = next((i for i, (a, b) in enumerate(zip(run, ids[start:])) if a != b), min(len(run), len(ids) - start))
        assert common_len(run, ids, start, size) == same // size * size


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_thousand_random_steps_against_a_table_of_prefixes(page_size, seed):
    "The model: prefix (whole pages) -> page. Locks and free pages are kept outside"
    rng, pool = random.Random(seed), 48
    c, table, free, held = RadixCache(pool, page_size), {}, set(range(pool)), []
    def prefixes(ids): return [tuple(ids[:n]) for n in range(page_size, len(ids) + 1, page_size)]
    def found(ids):
        out = []
        for p in prefixes(ids):
            if p not in table: break
            out.append(table[p])
        return out
    for _ in range(1000):
        ids = [rng.randint(0, 1) for _ in range(rng.randint(0, 9) * page_size)]
        action = rng.choice(["insert", "insert", "match", "lock", "unlock", "evict"])
        if action == "insert":
            known = found(ids)
            keep = rng.randint(0, len(known))  # the rest was computed again, into pages of its own
            missing = len(ids) // page_size - keep
            if missing > len(free): continue
            own = [free.pop() for _ in range(missing)]
            back = c.insert(ids, known[:keep] + own)
            assert back == own[:len(known) - keep]
            free |= set(back)
            for p, page in zip(prefixes(ids)[len(known):], own[len(known) - keep:]): table[p] = page
        elif action in ("match", "lock"):
            m = c.match_prefix(ids + [rng.randint(0, 1)] * (page_size > 1))
            assert m.pages == found(ids) and m.num_tokens == len(m.pages) * page_size
            if action == "lock": c.lock(m.handle); held.append((m, ids))
        elif action == "unlock" and held: c.unlock(held.pop(rng.randrange(len(held)))[0].handle)
        elif action == "evict":
            n, evictable = rng.randint(1, 8), c.evictable_pages
            gone = c.evict(n)
            assert len(gone) == len(set(gone)) == min(n, evictable)
            table = {p: page for p, page in table.items() if page not in gone}
            free |= set(gone)
        c.check_integrity()
        protected = {page for m, _ in held for page in m.pages}
        assert counts(c) == (len(table) - len(protected), len(protected)) and len(free) + len(table) == pool
        for m, ids in held: assert found(ids)[:len(m.pages)] == m.pages, "a locked page moved"
    for m, _ in held: c.unlock(m.handle)
    assert len(c.evict(pool)) == len(table) and counts(c) == (0, 0)


def test_eviction_does_not_walk_the_tree():
    "Ten times as many nodes, about the same work: counted in nodes that the heap hands out"
    def looks(count):
        c = RadixCache(count, 1)
        for i in range(count): c.insert([i], [i])
        before, c._enqueue = c._entries, (lambda node, f=c._enqueue: (calls.append(1), f(node)))
        calls = []
        for _ in range(50): c.evict(1)
        return len(calls)
    assert looks(2000) <= looks(200) + 50


def test_the_queue_does_not_grow_with_use():
    c = RadixCache(64, 1)
    for i in range(64): c.insert([i], [i])
    for _ in range(50):
        for i in range(64):
            m = c.match_prefix([i]); c.lock(m.handle); c.unlock(m.handle)
    assert len(c._queue) <= 64
    assert len(c.evict(64)) == 64


def test_the_next_turn_of_a_chat_finds_prompt_and_answer(tiny_model_dir):
    "Generated tokens are kept too, all but the last, whose KV nobody stored"
    from minisgl_edu.engine import Engine, EngineConfig
    from minisgl_edu.overlap import OverlapScheduler
    from minisgl_edu.scheduler import Scheduler
    engine = Engine(EngineConfig(model=tiny_model_dir, dtype="float64", device="cpu", page_size=1, num_pages=64))
    for kind in (Scheduler, OverlapScheduler):
        s = kind(engine)
        def ask(uid, ids, n):
            s.add(uid, ids, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True))
            events = []
            while s.has_work: events += s.step(); s.check_integrity()
            return [e.token_id for e in events], events[-1].cached_tokens
        answer, cached = ask(0, [5, 6, 7], 3)
        assert cached == 0 and s.stats()["pages_cached"] == 5 and s.stats()["pages_used"] == 0
        again, cached = ask(1, [5, 6, 7, *answer, 9], 2)
        assert cached == 5
        assert ask(2, [5, 6, 7], 3) == (answer, 2)   # F04: one prompt token at least is computed
    engine.close()


def test_two_that_compute_the_same_prompt_share_pages_afterwards(tiny_model_dir):  # F01
    from minisgl_edu.engine import Engine, EngineConfig
    from minisgl_edu.overlap import OverlapScheduler
    from minisgl_edu.scheduler import Scheduler
    engine = Engine(EngineConfig(model=tiny_model_dir, dtype="float64", device="cpu", page_size=1, num_pages=64))
    prompt, other = list(range(20, 32)), list(range(60, 80))
    one, two = [*prompt, 1], [*prompt, 2]  # not equal: whoever computes an equal prompt is waited for
    def run(kind, work):
        s, out = kind(engine), {}
        for uid, ids, n in work: s.add(uid, ids, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True))
        while s.has_work:
            for e in s.step(): out.setdefault(e.uid, []).append(e.token_id)
            s.check_integrity()
            a, b = s.ledger.live.get(0), s.ledger.live.get(1)
            if a and b and min(a.output_len, b.output_len) > 1:
                assert a.pages[:12] == b.pages[:12] and a.pages[12] != b.pages[12], "duplicates were kept"
        return out
    solo = {uid: run(Scheduler, [(uid, ids, n)])[uid] for uid, ids, n in [(0, one, 8), (1, two, 8), (2, other, 8)]}
    for kind in (Scheduler, OverlapScheduler):
        assert run(kind, [(0, one, 8), (1, two, 8), (2, other, 8)]) == solo
    engine.close()


def test_the_exercise_takes_another_cache_and_says_what_a_broken_one_does():
    "A chain of pages is a right answer; each way to break it is heard of in its own words"
    from minisgl_edu.checks import solved_or_not
    from plugins import PageChainCache
    class ShortKeys(PageChainCache):
        def _keys(self, token_ids): return [key[-self.page_size:] for key in super()._keys(token_ids)]
    class BeginningFirst(PageChainCache):
        def evict(self, num_pages):
            idle = [k for k, n in self.locks.items() if n == 0][:num_pages]
            for k in idle: del self.locks[k], self.used[k]
            return [self.page.pop(k) for k in idle]
    class NoLocks(PageChainCache):
        def lock(self, handle): pass
        def unlock(self, handle): pass
    assert solved_or_not("own_prefix_cache", PageChainCache).status == "solved"
    for broken, said in ((ShortKeys, "page 6 was computed behind the tokens 1 2"), (BeginningFirst, "must go first"), (NoLocks, "three pages are locked")):
        found = solved_or_not("own_prefix_cache", broken)
        assert found.status == "wrong" and said in found.reason, found
