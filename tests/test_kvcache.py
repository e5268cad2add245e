"The KV pool, the page table and the page allocator"
import random
from types import SimpleNamespace

import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st

from minisgl_edu.core import PrefixCache
from minisgl_edu.kvcache import (KVPool, NaivePrefixCache, PageAllocator, create_page_table, page_bytes, pages_needed,
                                 pages_that_fit, slots_of)

SHAPE = SimpleNamespace(num_layers=2, num_kv_heads=3, head_dim=4)

def make_pool(num_pages=5, page_size=4, dtype=torch.float32, layers=2, heads=3, dim=4):
    return KVPool(layers, num_pages, page_size, heads, dim, "cpu", dtype)

def test_pages_needed():
    for size in (1, 3, 16, 64):
        for n in range(200):
            pages = pages_needed(n, size)
            assert pages * size >= n and (pages - 1) * size < n or n == pages == 0

@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_slots_of_follows_the_pages(page_size):
    pages = random.Random(0).sample(range(100), 20)
    n = 20 * page_size
    expected = [pages[p // page_size] * page_size + p % page_size for p in range(n)]
    for start, end in [(0, n), (0, 1), (5, 5), (7, n - 2), (n - 1, n)]:
        slots = slots_of(pages, page_size, start, end)
        assert slots.dtype == np.int64 and slots.tolist() == expected[start:end]

def test_slots_are_64_bit():
    assert slots_of([2**31], 64, 0, 2).tolist() == [2**37, 2**37 + 1]
    assert slots_of(np.array([2**27], dtype=np.int32), 64, 0, 1).tolist() == [2**33]

def test_pool_is_one_buffer_with_a_dummy_page():
    pool = make_pool()
    assert pool.dummy_page == pool.num_pages == 5 and pool.num_slots == 6 * 4
    assert len(pool.k) == len(pool.v) == 2 and all(t.shape == (24, 3, 4) for t in (*pool.k, *pool.v))
    assert pool.nbytes == page_bytes(SHAPE, 4, torch.float32) * 6 == 2 * 2 * 24 * 3 * 4 * 4
    assert all(bool((t[20:] == 0).all()) for t in (*pool.k, *pool.v))
    for i, t in enumerate([*pool.k, *pool.v]): t.fill_(i)
    assert [t.unique().tolist() for t in (*pool.k, *pool.v)] == [[0.], [1.], [2.], [3.]]

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_store_writes_its_slots_and_nothing_else(dtype):
    pool = make_pool(dtype=dtype)
    pool.kv.fill_(torch.nan)
    before = pool.kv.clone()
    loc = torch.tensor([17, 3, 0, 22])
    qkv = torch.randn(4, 11, 4, dtype=dtype)
    k, v = qkv[:, 5:8], qkv[:, 8:] # as the model gives them: strided
    pool.store(1, k, v, loc)
    assert torch.equal(pool.k[1][loc], k) and torch.equal(pool.v[1][loc], v)
    before[1, loc, 0], before[1, loc, 1] = k, v
    assert torch.equal(pool.kv.nan_to_num(99), before.nan_to_num(99))

def test_page_table():
    table = create_page_table(3, 33, "cpu")
    assert table.shape == (3, 64) and table.dtype == torch.int32 and not table.any()
    assert create_page_table(1, 32, "cpu").shape == (1, 32)

def test_sizes_as_the_article_computes_them():
    llama = SimpleNamespace(num_layers=32, num_kv_heads=32, head_dim=128)
    assert page_bytes(llama, 1, torch.float16) == 512 * 2**10
    assert pages_that_fit(20 * 2**30, llama, 1, torch.float16) == 40_960
    assert pages_that_fit(20 * 2**30, llama, 16, torch.float16) == 2_560
    assert page_bytes(llama, 1, torch.float16, tp=4) == 128 * 2**10
    assert pages_that_fit(page_bytes(llama, 16, torch.float16) - 1, llama, 16, torch.float16) == 0

def test_lowest_pages_first():
    alloc = PageAllocator(10)
    assert alloc.allocate(4) == [0, 1, 2, 3] and alloc.allocate(3) == [4, 5, 6]
    alloc.free([5, 2, 1])
    assert alloc.num_free == 6 and alloc.free_pages == [1, 2, 5, 7, 8, 9]
    assert alloc.allocate(4) == [1, 2, 5, 7] and alloc.allocate(0) == []

def test_short_pool_says_the_numbers_and_keeps_its_pages():
    alloc = PageAllocator(3)
    alloc.allocate(2)
    with pytest.raises(MemoryError, match="2 pages wanted, 1 of 3 free"): alloc.allocate(2)
    assert alloc.free_pages == [2]

@pytest.mark.parametrize("pages, message", [([0, 3], "already free"), ([0, 0], "twice"), ([0, 8], "not one of"), ([0, -1], "not one of")])
def test_wrong_frees_change_nothing(pages, message):
    alloc = PageAllocator(8)
    alloc.allocate(3)
    with pytest.raises(ValueError, match=message): alloc.free(pages)
    alloc.check_integrity([0, 1, 2])
    assert alloc.num_free == 5

def test_integrity_names_the_page():
    alloc = PageAllocator(4)
    alloc.allocate(2)
    alloc.check_integrity([1, 0])
    for owned, message in [([0], r"lost: \[1\]"), ([0, 1, 1], r"two places: \[1\]"), ([0, 1, 3], r"two places: \[3\]"), ([0, 1, 4], r"not of this pool: \[4\]")]:
        with pytest.raises(AssertionError, match=message): alloc.check_integrity(owned)

@settings(max_examples=60, deadline=None, derandomize=True)
@given(num_pages=st.integers(1, 40), seed=st.integers(0, 2**16))
def test_pages_are_never_lost_or_shared(num_pages, seed):
    rng, alloc, held = random.Random(seed), PageAllocator(num_pages), []
    for _ in range(60):
        if rng.random() < 0.6:
            n = rng.randint(0, num_pages // 2 + 1)
            lowest = alloc.free_pages[:n]
            if n > alloc.num_free:
                with pytest.raises(MemoryError): alloc.allocate(n)
            else:
                pages = alloc.allocate(n)
                assert pages == lowest
                held.append(pages)
        elif held:
            pages = held.pop(rng.randrange(len(held)))
            rng.shuffle(pages)
            alloc.free(pages)
        owned = [p for pages in held for p in pages]
        alloc.check_integrity(owned)
        assert alloc.num_free + len(owned) == num_pages

def test_naive_prefix_cache_keeps_nothing():
    cache = NaivePrefixCache()
    assert isinstance(cache, PrefixCache)
    assert cache.insert([1, 2, 3, 4], [7, 9]) == [7, 9]
    match = cache.match_prefix([1, 2, 3, 4])
    assert (match.pages, match.num_tokens) == ([], 0)
    cache.lock(match.handle); cache.unlock(match.handle); cache.check_integrity()
    assert cache.evict(3) == [] and cache.evictable_pages == cache.protected_pages == 0
