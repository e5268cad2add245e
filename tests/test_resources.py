"Rows and pages: each in exactly one place, and a check that notices when they are not."
import numpy as np, pytest, torch
from hypothesis import given, strategies as st

from minisgl_edu.core import Req, SamplingParams
from minisgl_edu.kvcache import NaivePrefixCache, slots_of
from minisgl_edu.resources import CacheManager, TableManager, make_prefix_cache
from plugins import PageChainCache


def request(uid, prompt, max_tokens=8): return Req(uid, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
def table_of(rows, length, page_size=1): return TableManager(rows, torch.zeros(rows + 1, length, dtype=torch.int32), page_size)


def admit(req, table, cache):
    "What admission does, without a budget: match, lock, row, pages for the prompt"
    match = cache.match(req.input_ids)
    cache.lock(match.handle)
    req.table_idx, req.handle, req.cached_len, req.cached_tokens, req.shared_len = table.allocate(), match.handle, *[match.num_tokens] * 3
    table.assign(req, match.pages)
    req.schedule(len(req.input_ids) - req.cached_len)
    table.assign(req, cache.allocate(-(-req.device_len // cache.page_size) - len(req.pages)))


def finish(req, table, cache, output=(), reason="length"):
    "Compute the prompt and all output but the last token, as a run does, then release"
    req.complete_one()
    for t in output: req.append_host(t)
    total = len(req.input_ids) - (1 if output else 0)
    table.assign(req, cache.allocate(max(0, -(-total // cache.page_size) - len(req.pages))))
    req.cached_len, req.device_len, req.finish_reason = total, total + 1, reason
    cache.release(req)
    table.free(req.table_idx)
    req.table_idx = -1


def test_rows_are_handed_out_once():
    t = table_of(3, 32)
    rows = [t.allocate() for _ in range(3)]
    assert sorted(rows) == [0, 1, 2] and t.num_free == 0 and t.dummy_row == 3
    with pytest.raises(MemoryError, match="3 rows"): t.allocate()
    t.free(1)
    for bad in (1, 3, -1, 7):
        with pytest.raises(ValueError, match=str(bad)): t.free(bad)
    assert t.allocate() == 1


@given(st.integers(1, 7), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.randoms())
def test_slots_of_many_rows_are_those_of_each(page_size, lens, rng):
    t = table_of(len(lens), 64, page_size)
    free = list(range(100)); rng.shuffle(free)
    reqs = [request(i, [1] * n) for i, n in enumerate(lens)]
    for r in reqs:
        r.table_idx = t.allocate()
        while len(r.pages) * page_size < len(r.input_ids): t.assign(r, [free.pop() for _ in range(rng.randint(1, 3)) if free][:64 // page_size - len(r.pages)])
    rows = np.concatenate([np.full(n, r.table_idx) for r, n in zip(reqs, lens)])
    positions = np.concatenate([np.arange(n) for n in lens])
    assert t.slots(rows, positions).tolist() == [s for r, n in zip(reqs, lens) for s in slots_of(r.pages, page_size, 0, n)]


def test_cache_by_name_or_class():
    assert isinstance(make_prefix_cache("naive", 8, 4), NaivePrefixCache) and not isinstance(make_prefix_cache("auto", 8, 4), NaivePrefixCache)
    mine = make_prefix_cache(PageChainCache, 8, 4)
    assert (mine.num_pages, mine.page_size) == (8, 4)
    with pytest.raises(ValueError, match="'lru'"): make_prefix_cache("lru", 8, 4)


def test_naive_cache_gives_everything_back():
    table, cache = table_of(2, 32, 4), CacheManager(8, 4, NaivePrefixCache())
    a, b = request(0, list(range(10))), request(1, list(range(10)))
    for r in (a, b): admit(r, table, cache)
    assert cache.available_pages == 2 and not set(a.pages) & set(b.pages) and a.cached_tokens == b.cached_tokens == 0
    cache.check_integrity([a, b]); table.check_integrity([a, b])
    finish(a, table, cache)
    cache.check_integrity([b]); table.check_integrity([b])
    finish(b, table, cache)
    assert cache.available_pages == 8 and table.num_free == 2 and a.pages == []


@pytest.mark.parametrize("page_size, cached", [(1, 7), (4, 4)])
def test_at_least_one_prompt_token_is_left_to_compute(page_size, cached):  # F04
    table, cache = table_of(2, 32, page_size), CacheManager(32 // page_size, page_size, PageChainCache(32 // page_size, page_size))
    a, b = request(0, [5, 6, 7, 8, 9, 10, 11, 12]), request(1, [5, 6, 7, 8, 9, 10, 11, 12])
    admit(a, table, cache); finish(a, table, cache, output=[1, 2, 3])
    assert cache.cached_pages == 10 // page_size and cache.available_pages == 32 // page_size
    admit(b, table, cache)
    assert b.cached_tokens == cached < b.prompt_len and b.extend_len == 8 - cached
    cache.check_integrity([b]); table.check_integrity([b])


def test_allocation_and_eviction_count_in_pages():  # F05
    table, cache = table_of(2, 32, 4), CacheManager(8, 4, PageChainCache(8, 4))
    a = request(0, list(range(16)))
    admit(a, table, cache); finish(a, table, cache)
    assert (cache.cached_pages, cache.allocator.num_free, cache.available_pages) == (4, 4, 8)
    b = request(1, list(range(50, 74)))
    admit(b, table, cache)
    assert len(set(b.pages)) == 6 and cache.cached_pages == 2 and cache.allocator.num_free == 0
    cache.check_integrity([b])


def test_locked_pages_are_not_available():
    cache = CacheManager(6, 4, PageChainCache(6, 4))
    table = table_of(3, 32, 4)
    a = request(0, list(range(12)))
    admit(a, table, cache); finish(a, table, cache)
    b = request(1, list(range(12)) + [99])
    admit(b, table, cache)
    assert b.cached_tokens == 12 and cache.available_pages == 2 and cache.prefix_cache.protected_pages == 3
    with pytest.raises(MemoryError, match="3 pages wanted, 2 of 6"): cache.allocate(3)
    cache.check_integrity([b])
    finish(b, table, cache)
    assert cache.available_pages == 6 and cache.prefix_cache.protected_pages == 0


def test_the_last_sampled_token_is_not_cached():  # F10, also after a step that ran in vain
    for in_vain in (0, 1):
        table, cache = table_of(2, 32), CacheManager(16, 1, PageChainCache(16, 1))
        a = request(0, [0, 1, 2, 3], max_tokens=8)
        admit(a, table, cache); a.complete_one()
        a.append_host(4); a.append_host(5)
        table.assign(a, cache.allocate(1 + in_vain))
        a.cached_len, a.finish_reason = 5 + in_vain, "stop"
        cache.release(a)
        assert cache.cached_pages == 5 and cache.allocator.num_free == 11
        assert cache.match([0, 1, 2, 3, 4, 5, 6]).num_tokens == 5


def test_nothing_of_a_failed_request_is_kept():
    table, cache = table_of(2, 32, 2), CacheManager(8, 2, PageChainCache(8, 2))
    a = request(0, list(range(8)))
    admit(a, table, cache); finish(a, table, cache, reason="error")
    assert cache.cached_pages == 0 and cache.allocator.num_free == 8
    b = request(1, list(range(8))); admit(b, table, cache); finish(b, table, cache)
    c = request(2, list(range(8))); admit(c, table, cache); finish(c, table, cache, reason="error")
    assert c.cached_tokens == 6 and cache.cached_pages == 4 and cache.prefix_cache.protected_pages == 0  # what it found stays


def broken_states():
    "Ways to lose a page or a row, each with the words that the check must say"
    def lost(reqs, table, cache): reqs[0].pages.pop()
    def leaked(reqs, table, cache): cache.allocate(1)
    def shared(reqs, table, cache): reqs[0].pages[0] = reqs[1].pages[0]
    def freed(reqs, table, cache): cache.allocator.free(reqs[0].pages[:1])
    def row_twice(reqs, table, cache): reqs[0].table_idx = reqs[1].table_idx
    def row_lost(reqs, table, cache): table.allocate()
    def row_stale(reqs, table, cache): table.pages[reqs[0].table_idx, 0] += 1
    def too_few(reqs, table, cache): reqs[0].cached_len = 99
    return [(lost, "neither free nor owned"), (leaked, "neither free nor owned"), (shared, "neither free nor owned|two places"), (freed, "two places"),
            (row_twice, "rows"), (row_lost, "rows"), (row_stale, "differs"), (too_few, "too few")]


@pytest.mark.parametrize("damage, words", broken_states(), ids=lambda x: getattr(x, "__name__", ""))
def test_the_check_notices(damage, words):
    table, cache = table_of(4, 32, 4), CacheManager(12, 4, NaivePrefixCache())
    reqs = [request(i, list(range(9))) for i in range(2)]
    for r in reqs: admit(r, table, cache)
    cache.check_integrity(reqs); table.check_integrity(reqs)
    damage(reqs, table, cache)
    with pytest.raises(AssertionError, match=words): cache.check_integrity(reqs); table.check_integrity(reqs)


def test_the_check_compares_the_device_row():
    table, cache = table_of(1, 32, 4), CacheManager(4, 4, NaivePrefixCache())
    r = request(0, list(range(6))); admit(r, table, cache); r.complete_one()
    device = torch.zeros(2, 32, dtype=torch.int32)
    device[r.table_idx, :6] = torch.from_numpy(slots_of(r.pages, 4, 0, 6))
    table.check_integrity([r], device)
    device[r.table_idx, 5] += 1
    with pytest.raises(AssertionError, match="device's row"): table.check_integrity([r], device)


def test_a_page_that_the_cache_gave_up_under_a_hit_is_noticed():
    table, cache = table_of(2, 32, 4), CacheManager(8, 4, PageChainCache(8, 4))
    a = request(0, list(range(8))); admit(a, table, cache); finish(a, table, cache)
    b = request(1, list(range(9))); admit(b, table, cache)
    cache.check_integrity([b])
    cache.unlock(b.handle); cache.allocator.free(cache.prefix_cache.evict(2))  # a lock lost
    with pytest.raises(AssertionError, match="given up"): cache.check_integrity([b])


def lies():
    "Caches that return something else than they did, each with the words that must be said of it"
    class Nothing(PageChainCache):
        def insert(self, token_ids, pages): super().insert(token_ids, pages)
    class Floats(PageChainCache):
        def insert(self, token_ids, pages): return [float(p) for p in pages]
    class Nested(PageChainCache):
        def insert(self, token_ids, pages): return [pages]
    class NotOffered(PageChainCache):
        def insert(self, token_ids, pages): return [*super().insert(token_ids, pages), 7]
    class Shared(PageChainCache):  # refuses a page that it had before
        def insert(self, token_ids, pages): return [*super().insert(token_ids, pages), pages[0]] if len(pages) > 2 else super().insert(token_ids, pages)
    class Twice(NaivePrefixCache):
        def __init__(self, num_pages, page_size): pass
        def insert(self, token_ids, pages): return list(pages) * 2
    class TwoOwners(PageChainCache):
        def insert(self, token_ids, pages): super().insert(token_ids, pages); return list(pages)
    class Loses(PageChainCache):
        def insert(self, token_ids, pages): return []
    class Deaf(PageChainCache):
        def evict(self, num_pages): super().evict(num_pages)
    class Letters(PageChainCache):
        def evict(self, num_pages): return "".join(map(str, super().evict(num_pages)))
    class NotIts(PageChainCache):
        def evict(self, num_pages): return [*super().evict(num_pages)[1:], 4]
    class Again(PageChainCache):
        def evict(self, num_pages): return super().evict(num_pages) * 2
    class Stingy(PageChainCache):
        def evict(self, num_pages): return super().evict(num_pages - 1)
    class Drops(PageChainCache):
        def evict(self, num_pages): return super().evict(num_pages + 1)[1:]
    class Hoards(PageChainCache):  # gives up what it still finds
        def evict(self, num_pages): return list(self.page.values())[:num_pages]
    class Breaks(PageChainCache):  # takes no notice of a lock
        def evict(self, num_pages): self.locks = dict.fromkeys(self.locks, 0); return super().evict(num_pages)
    return [(Nothing, r"insert returned None: no list of page numbers"), (Floats, r"insert returned \[0.0, 1.0\]: no list of page numbers"),
            (Nested, r"insert returned \[\[0, 1\]\]: no list of page numbers"), (NotOffered, r"insert returned \[7\]: page 7 is not the caller's"),
            (Shared, r"insert returned \[0\]: page 0 is not the caller's"), (Twice, r"insert returned \[0, 1, 0, 1\]: a page comes twice"),
            (TwoOwners, "insert says it took 0 of 2 pages, and its counts grew by 2"), (Loses, "insert says it took 2 of 2 pages, and its counts grew by 0"),
            (Deaf, "evict returned None: no list of page numbers"), (Letters, "evict returned '.*': no list of page numbers"),
            (NotIts, r"evict returned \[.*4\]: page 4 is not in the cache"), (Again, "evict returned .*: a page comes twice"),
            (Stingy, r"evict gave up 1 pages of 2 wanted, and its counts \(evictable, protected\) went from \(2, 2\) to \(1, 2\)"),
            (Drops, r"evict gave up 1 pages of 2 wanted, .* from \(2, 2\) to \(0, 2\)"), (Hoards, r"evict gave up 2 pages of 2 wanted, .* from \(2, 2\) to \(2, 2\)"),
            (Breaks, r"evict gave up 2 pages of 2 wanted, .* from \(2, 2\) to \(2, 0\)")]


@pytest.mark.parametrize("kind, words", lies(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_cache_that_lies_is_named(kind, words):
    "At the call that went wrong, and not where somebody else's page turns up"
    table, cache = table_of(4, 32, 4), CacheManager(8, 4, kind(8, 4))
    with pytest.raises(TypeError, match=f"^cache: {kind.__name__}.{words}$"):
        a = request(0, list(range(8))); admit(a, table, cache); finish(a, table, cache)
        b = request(1, list(range(17))); admit(b, table, cache); finish(b, table, cache)   # finds two pages, brings two
        c = request(2, [*range(8), 50]); admit(c, table, cache)                            # locks two, and owns page 4
        cache.allocate(cache.allocator.num_free + 2)


@pytest.mark.parametrize("method, lost", [("insert", [2, 3]), ("unlock", [])])
def test_where_the_cache_fails_a_request_still_lets_go(method, lost):
    "What the cache was offered it may have taken, before it failed: those pages go to nobody else. All others return, and the lock"
    table, cache = table_of(4, 32, 4), CacheManager(8, 4, PageChainCache(8, 4))
    a = request(0, list(range(8))); admit(a, table, cache); finish(a, table, cache)
    b = request(1, list(range(18))); admit(b, table, cache)  # finds pages 0 and 1; its own are 2, 3 and a part of 4
    assert b.pages == [0, 1, 2, 3, 4] and cache.prefix_cache.protected_pages == 2
    real = getattr(cache.prefix_cache, method)
    def fail(*args): real(*args); raise ZeroDivisionError
    setattr(cache.prefix_cache, method, fail)
    with pytest.raises(ZeroDivisionError): finish(b, table, cache)
    assert (b.pages, b.handle, b.shared_len, cache.prefix_cache.protected_pages) == ([], None, 0, 0)
    assert set(cache.allocator.free_pages) == ({4, 5, 6, 7}) and cache.in_cache == {0, 1, 2, 3} - set(lost)
    setattr(cache.prefix_cache, method, real)
    c = request(2, list(range(40, 56))); admit(c, table, cache)
    assert set(c.pages) == {4, 5, 6, 7}


def test_a_cache_that_does_not_find_what_it_took_is_named():
    "A live request would go on owning pages that the cache may give up"
    class Shortsighted(PageChainCache):
        def match_prefix(self, token_ids): return super().match_prefix(token_ids[:4])
    table, cache = table_of(1, 32, 4), CacheManager(8, 4, Shortsighted(8, 4))
    a = request(0, list(range(8))); admit(a, table, cache); a.complete_one()
    with pytest.raises(TypeError, match="^cache: Shortsighted.match_prefix does not find all that insert took$"): cache.keep(a, 8)


@given(st.sampled_from([1, 2, 3, 5]), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 14), st.integers(0, 6), st.booleans()), max_size=25), st.booleans())
def test_random_lives_leave_nothing_behind(page_size, lives, keeps):
    "Prompts that share prefixes come and go in any order; after every step each page is in one place"
    num_pages = 96 // page_size
    table, cache = table_of(3, 32, page_size), CacheManager(num_pages, page_size, (PageChainCache if keeps else lambda n, p: NaivePrefixCache())(num_pages, page_size))
    live = []
    for uid, (family, length, extra, oldest) in enumerate(lives):
        if len(live) == 3:
            r = live.pop(0 if oldest else -1)
            finish(r, table, cache, output=[family] * extra)
        r = request(uid, [family] * 3 + list(range(length)))
        admit(r, table, cache); live.append(r)
        cache.check_integrity(live); table.check_integrity(live)
        assert cache.in_cache == cache.kept(live) and (keeps or r.cached_tokens == 0)
    while live:
        finish(live.pop(), table, cache)
        cache.check_integrity(live); table.check_integrity(live)
        assert cache.in_cache == cache.kept(live)
    assert cache.available_pages == num_pages and cache.prefix_cache.protected_pages == 0 and table.num_free == 3


def test_the_page_map_shows_each_page_once():
    cache = CacheManager(10, 2, make_prefix_cache("radix", 10, 2))
    a, b = Req(0, [1, 2, 3, 4, 5], SamplingParams(max_tokens=4)), Req(1, [1, 2, 3, 4, 9, 9, 9], SamplingParams(max_tokens=4))
    for req in (a, b):
        match = cache.match(req.input_ids)
        cache.lock(match.handle)
        req.handle, req.shared_len, req.cached_len = match.handle, match.num_tokens, req.prompt_len
        req.pages = match.pages + cache.allocate(-(-req.prompt_len // 2) - len(match.pages))
        if req is a: cache.release(a)
    codes = cache.page_map([b])
    assert [codes[p] for p in b.pages] == ["s", "s", "u", "u"] and codes.count(".") == cache.allocator.num_free and len(codes) == 10
    assert CacheManager(10, 2, NaivePrefixCache()).page_map([]) == "." * 10
    small = cache.page_map([b], most=4)  # three pages to a character: the one most in use is shown
    assert len(small) == 4 and small == "".join(max(codes[i:i + 3], key=".csu".index) for i in range(0, 10, 3))


@pytest.mark.parametrize("pages, why", [([7], "page 7 is not in the cache"), ([0, 0], "a page comes twice"), ([10**8], "page 100000000 is not in the cache")])
def test_a_match_names_only_pages_that_the_cache_has(pages, why):
    "Attention follows a matched page to an address: one that the cache never took must not get there"
    from minisgl_edu.core import Match
    from minisgl_edu.resources import CheckedCache
    class Lies(PageChainCache):
        def match_prefix(self, token_ids): return Match(pages, 4 * len(pages), None)
    cache = CheckedCache(4, Lies(8, 4))
    cache.insert(list(range(4)), [0])
    with pytest.raises(TypeError, match=f"cache: Lies.match_prefix returned .*: {why}"): cache.match_prefix(list(range(12)))
