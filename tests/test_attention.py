"Paged attention against a dense float64 reference that never sees a page"
import random
from types import SimpleNamespace

import pytest, torch
from hypothesis import given, settings, strategies as st

from minisgl_edu import attention, layers
from minisgl_edu.attention import NumbaAttention, TorchAttention, as_run, causal_mask, decode_loop, extend_attention, make_backend, split_groups
from minisgl_edu.checkpoint import ModelConfig, dummy_weights
from minisgl_edu.core import AttentionBackend, ForwardContext
from minisgl_edu.device import memory_free
from minisgl_edu.kvcache import KVPool, PageAllocator, create_page_table, pages_needed, slots_of
from minisgl_edu.layers import TorchOps, can_loop
from minisgl_edu.models import create_model, generate_naive

def reference(q, keys, values, cached_len):
    "One request in float64, one head and one position at a time: [extend_len, num_qo_heads, head_dim]"
    q, keys, values = q.double(), keys.double(), values.double()
    out, group = torch.zeros_like(q), q.shape[1] // keys.shape[1]
    for i in range(q.shape[0]):
        end = cached_len + i + 1
        for h in range(q.shape[1]):
            scores = keys[:end, h // group] @ q[i, h] / q.shape[-1]**0.5
            out[i, h] = scores.softmax(0) @ values[:end, h // group]
    return out

class Case:
    "Requests with random KV in a pool whose every other slot is NaN"
    def __init__(self, spans, page_size=4, num_qo=4, num_kv=2, dim=8, dtype=torch.float64, seed=0, runs=False, layers=1, spare=7):
        gen, self.spans = torch.Generator().manual_seed(seed), spans
        rand = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)
        self.cached, self.lens = [c for c, _ in spans], [e for _, e in spans]
        self.qs = [rand(e - c, num_qo, dim) for c, e in spans]
        self.ks, self.vs = ([rand(e, num_kv, dim) for e in self.lens] for _ in "kv")
        num_pages = sum(pages_needed(e, page_size) for e in self.lens) + spare
        self.pool = KVPool(layers, num_pages, page_size, num_kv, dim, "cpu", dtype)
        self.pool.kv.fill_(torch.nan)
        order = list(range(num_pages))
        if not runs: random.Random(seed).shuffle(order)
        rows = random.Random(seed + 1).sample(range(len(spans) + 2), len(spans))
        self.table = create_page_table(len(spans) + 2, max(self.lens), "cpu")
        self.table.fill_(order[-1] * page_size) # behind a request's end the table may hold anything: here, a NaN slot
        self.slots = []
        for row, k, v, (c, e) in zip(rows, self.ks, self.vs, spans):
            pages = [order.pop(0) for _ in range(pages_needed(e, page_size))]
            slots = torch.from_numpy(slots_of(pages, page_size, 0, e))
            self.table[row, :e] = slots.int()
            for layer in range(layers): self.pool.store(layer, k[:c], v[:c], slots[:c])
            self.slots.append(slots)
        positions = torch.cat([torch.arange(c, e) for c, e in spans])
        out_loc = torch.cat([s[c:] for s, c in zip(self.slots, self.cached)])
        ends = torch.tensor([e - c for c, e in spans]).cumsum(0)
        self.ctx = ForwardContext("mixed", self.cached, self.lens, torch.tensor(rows), positions * 0, positions, out_loc, ends - 1)

    def run(self, backend=None, layer=0):
        backend = backend or TorchAttention(None, self.pool, self.table)
        backend.prepare(self.ctx)
        k, v = (torch.cat([t[c:] for t, c in zip(ts, self.cached)]) for ts in (self.ks, self.vs))
        return backend.forward(torch.cat(self.qs), k, v, layer, self.ctx)

    def expected(self): return torch.cat([reference(*a) for a in zip(self.qs, self.ks, self.vs, self.cached)])

    def check(self, tolerance=1e-12):
        out, want = self.run(), self.expected()
        assert out.shape == want.shape and bool(out.isfinite().all())
        assert (out.double() - want).abs().max() <= tolerance

SPANS = dict(
    prefill=[(0, 7), (0, 2), (0, 13)],
    prefix=[(5, 12), (8, 10), (1, 9)],
    one_token=[(0, 1)],
    one_token_extend=[(6, 7), (0, 1), (19, 20)],
    decode=[(n, n + 1) for n in (3, 16, 0, 40, 7, 15, 16, 33)],
    even=[(9, 10)] * 4,
    mixed=[(3, 4), (0, 6), (12, 17), (30, 31), (0, 1), (4, 6), (11, 12)],
)

@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("name", SPANS)
def test_equals_the_dense_reference(name, page_size): Case(SPANS[name], page_size).check()

@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (7, 1), (14, 2), (8, 1)])
@pytest.mark.parametrize("name", ["prefill", "prefix", "decode", "mixed"])
def test_any_ratio_of_heads(name, heads):
    Case(SPANS[name], 3, *heads).check()
    Case(SPANS[name], 3, *heads, dtype=torch.float32).check(1e-5) # float32 rounding over 40 keys

def test_half_precision_is_close():
    Case(SPANS["mixed"], 16, dim=64, dtype=torch.bfloat16).check(0.03) # the outputs themselves carry 8 bits

loops = pytest.mark.skipif(not can_loop("cpu", torch.float32), reason="needs numba")

class Looped(Case):
    "A case in float32, run by the loop"
    def __init__(self, *args, **options): super().__init__(*args, dtype=torch.float32, **options)
    def run(self, backend=None, layer=0): return super().run(backend or NumbaAttention(None, self.pool, self.table), layer)

@loops
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("name", SPANS)
def test_the_loop_equals_the_dense_reference(name, page_size): Looped(SPANS[name], page_size).check(1e-5)

@loops
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (7, 1), (14, 2)])
@pytest.mark.parametrize("dim", [5, 64, 80])
def test_the_loop_takes_any_heads(heads, dim):
    spans = [(n - 1, n) for n in (1, 2, 31, 32, 33, 63, 64, 65, 150)] + [(3, 9)]
    Looped(spans, 3, *heads, dim).check(1e-5)
    Looped([(149, 150)], 3, *heads, dim).check(1e-5) # alone: its KV heads are shared out

@loops
@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), page_size=st.sampled_from([1, 3, 16, 64]), threads=st.integers(1, 5))
def test_the_loop_on_any_team(seed, page_size, threads):
    "Requests and heads are shared out without a gap, whatever the number of threads"
    rng, before = random.Random(seed), torch.get_num_threads()
    spans = [(n, n + 1) for n in (rng.choice([0, rng.randint(0, 120)]) for _ in range(rng.randint(1, 12)))]
    try:
        torch.set_num_threads(threads)
        Looped(spans, page_size, 6, 2, seed=seed).check(1e-5)
    finally: torch.set_num_threads(before)

@loops
def test_the_loop_without_openmp_runs_on_one_thread(monkeypatch):
    case = Looped(SPANS["mixed"], 3)
    for module in (attention, layers): monkeypatch.setattr(module, "openmp", lambda: None)
    layers.team.cache_clear()
    try:
        case.check(1e-5)
        assert torch.allclose(layers.NumbaOps().linear(torch.ones(3, 7), torch.eye(7)), torch.ones(3, 7))
    finally: layers.team.cache_clear()
    threads = torch.get_num_threads()
    try:
        for n, kind in ((2, TorchAttention), (1, NumbaAttention)):
            torch.set_num_threads(n)
            assert type(make_backend("auto", None, case.pool, case.table)) is kind, "one core's loop is no match for PyTorch on several"
    finally: torch.set_num_threads(threads)

@loops
def test_the_loop_stores_where_the_table_says_and_takes_strided_slices():
    case, plain = (Looped(SPANS["decode"], 3, layers=2, seed=3) for _ in range(2))
    want = plain.run(TorchAttention(None, plain.pool, plain.table), layer=1)
    backend = NumbaAttention(None, case.pool, case.table)
    backend.prepare(case.ctx)
    k, v = (torch.cat([t[c:] for t, c in zip(ts, case.cached)]) for ts in (case.ks, case.vs))
    qkv = torch.cat((torch.cat(case.qs), k, v), dim=1)  # as one product makes them
    out = backend.forward(*qkv.split((4, 2, 2), dim=1), 1, case.ctx)
    assert torch.allclose(out, want, atol=1e-5)
    assert torch.equal(case.pool.kv.nan_to_num(7.0), plain.pool.kv.nan_to_num(7.0)), "one slot of each request is written, and no other"

@loops
def test_each_shape_keeps_its_code_under_its_own_name():
    "Kept code is found by the name: one for each shape, and another when the helpers that are compiled in change"
    import zlib
    from pathlib import Path
    names = [decode_loop(*shape).fn.__qualname__ for shape in ((4, 2, 8), (4, 2, 16))]
    assert names[0] != names[1] and all(f"{zlib.crc32(Path(layers.__file__).read_bytes()):x}" in n for n in names)

@loops
def test_nan_in_a_request_stays_in_that_request():
    case = Looped([(9, 10), (20, 21), (33, 34)], 3)
    case.pool.kv[0, case.slots[1][4]] = torch.nan
    out, want = case.run(), case.expected()
    assert bool(out[1].isnan().all()) and torch.allclose(out[[0, 2]].double(), want[[0, 2]], atol=1e-5)

@loops
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_loop_refuses_other_types(dtype):
    case = Case(SPANS["decode"], dtype=dtype)
    with pytest.raises(ValueError, match=f"Numba, a CPU and float32, got {dtype} on cpu"): NumbaAttention(None, case.pool, case.table)

@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), page_size=st.sampled_from([1, 3, 16, 64]), runs=st.booleans())
def test_random_mixed_batches(seed, page_size, runs):
    rng = random.Random(seed)
    spans = []
    for _ in range(rng.randint(1, 9)):
        cached = rng.choice([0, rng.randint(0, 50)])
        spans.append((cached, cached + rng.choice([1, 1, rng.randint(1, 20)])))
    Case(spans, page_size, *rng.choice([(2, 2), (4, 1), (7, 1), (6, 2)]), seed=seed, runs=runs).check()

@pytest.mark.parametrize("tokens", [1, 5, 20, 64])
def test_groups_of_any_size_give_the_same(tokens):
    case = Case(SPANS["decode"] + SPANS["prefix"], 3)
    backend = TorchAttention(None, case.pool, case.table)
    backend.max_tokens, backend.scratch = tokens, backend.scratch[:tokens]
    assert (case.run(backend) - case.expected()).abs().max() < 1e-12

@settings(max_examples=100, deadline=None, derandomize=True)
@given(lens=st.lists(st.integers(1, 60), min_size=1, max_size=30), max_tokens=st.integers(1, 200))
def test_groups_cover_everything_and_fit(lens, max_tokens):
    lens = sorted(lens, reverse=True)
    groups = split_groups(lens, max_tokens)
    assert [i for a, b in groups for i in range(a, b)] == list(range(len(lens)))
    for a, b in groups: assert b == a + 1 or (b - a) * lens[a] <= max_tokens
    for (a, b), _ in zip(groups, groups[1:]): assert (b + 1 - a) * lens[a] > max_tokens # no group could take one more

def test_only_its_slots_are_written():
    case = Case(SPANS["mixed"], 4, layers=3)
    before = case.pool.kv.clone()
    case.run(layer=1)
    k, v = (torch.cat([t[c:] for t, c in zip(ts, case.cached)]) for ts in (case.ks, case.vs))
    before[1, case.ctx.out_loc, 0], before[1, case.ctx.out_loc, 1] = k, v
    assert torch.equal(case.pool.kv.nan_to_num(99), before.nan_to_num(99))

def test_runs_are_read_in_place():
    slots = torch.arange(40, 60)
    assert as_run(slots) == slice(40, 60) and as_run(slots[:1]) == slice(40, 41)
    for other in ([3, 5, 4, 6], [3, 4, 4, 6], [3, 2]): assert torch.is_tensor(as_run(torch.tensor(other)))
    case = Case([(30, 31)], 4, runs=True)
    case.check()
    assert isinstance(case.ctx.metadata.groups[0].slots, slice)

def test_chunks_see_up_to_their_own_end():
    "Prompt of 10, chunks of 4: the keys of the chunks are 4, 8 and 10, and the last output equals the unchunked one"
    whole = Case([(0, 10)], 4)
    want = whole.run()
    case = Case([(0, 10)], 4)
    backend, parts = TorchAttention(None, case.pool, case.table), []
    for start, end in [(0, 4), (4, 8), (8, 10)]:
        loc = case.slots[0][start:end]
        ctx = ForwardContext("prefill", [start], [end], case.ctx.rows, loc * 0, torch.arange(start, end), loc, torch.tensor([end - start - 1]))
        backend.prepare(ctx)
        extend = ctx.metadata.extends[0]
        assert (end if extend.mask is None else extend.mask.shape[1]) == end
        parts.append(backend.forward(case.qs[0][start:end], case.ks[0][start:end], case.vs[0][start:end], 0, ctx))
    assert (torch.cat(parts) - want).abs().max() < 1e-12

@pytest.mark.parametrize("span", [(0, 5), (4, 9), (4, 5)])
def test_query_head_reads_its_kv_head(span):
    "12 query heads, 2 KV heads whose values are 0 and 1"
    case = Case([span], 4, 12, 2)
    for v in case.vs: v[:] = torch.arange(2.0)[:, None]
    case.pool.v[0][case.slots[0][:span[0]]] = case.vs[0][:span[0]]
    out = case.run()
    assert torch.allclose(out[:, :6], torch.zeros(()).double(), atol=1e-12) and torch.allclose(out[:, 6:], torch.ones(()).double())

def test_one_request_does_not_depend_on_the_others():
    spans = SPANS["mixed"]
    together = Case(spans, 3).run().split([e - c for c, e in spans])
    for i, span in enumerate(spans):
        case = Case(spans, 3)
        for name in ("qs", "ks", "vs", "cached", "lens", "slots", "spans"): setattr(case, name, [getattr(case, name)[i]])
        positions, loc = torch.arange(*span), case.slots[0][span[0]:]
        case.ctx = ForwardContext("mixed", case.cached, case.lens, case.ctx.rows[i:i + 1], positions * 0, positions, loc, torch.tensor([len(loc) - 1]))
        assert (case.run() - together[i]).abs().max() < 1e-12

def test_a_padding_row_is_harmless():
    "A dummy request of length 1 writes into the dummy page only, and its output is finite"
    case = Case(SPANS["decode"], 4)
    want = case.run()
    case = Case(SPANS["decode"], 4)
    ctx, dummy = case.ctx, case.pool.dummy_page * 4
    free_row = ({*range(len(case.table))} - set(ctx.rows.tolist())).pop()
    case.table[free_row].fill_(dummy)
    pad = lambda t, x: torch.cat([t, torch.tensor([x])])
    case.ctx = ForwardContext("decode", ctx.cached_lens + [0], ctx.device_lens + [1], pad(ctx.rows, free_row), pad(ctx.input_ids, 0),
        pad(ctx.positions, 0), pad(ctx.out_loc, dummy), pad(ctx.last_indices, len(want)))
    for ts in (case.qs, case.ks, case.vs): ts.append(torch.zeros_like(ts[0][:1]))
    case.cached.append(0)
    out = case.run()
    assert bool(out.isfinite().all()) and (out[:-1] - want).abs().max() < 1e-12
    written = {*case.ctx.out_loc.tolist()}
    old = {s for slots, c in zip(case.slots, case.cached) for s in slots[:c].tolist()}
    assert {*case.pool.k[0].isfinite().all(-1).all(-1).nonzero().flatten().tolist()} == written | old

def test_a_long_prompt():
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1500, h, 16, generator=gen) for h in (6, 2, 2))
    out = extend_attention(q, k, v)
    for i in (0, 1, 750, 1499):
        want = reference(q[i:i + 1], k[:i + 1], v[:i + 1], i)
        assert (out[i:i + 1].double() - want).abs().max() < 1e-5 # float32 rounding over 1,500 keys
    tail = extend_attention(q[1400:], k, v, causal_mask(1400, 1500, "cpu", torch.float32))
    assert (tail - out[1400:]).abs().max() < 1e-5

def test_causal_mask_is_lower_right():
    assert causal_mask(2, 5, "cpu", torch.float32).eq(0).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]

def test_slots_beyond_two_billion_elements():
    "The same request at the start and at the end of a pool of more than 2^31 elements (memory that is never touched costs nothing)"
    if memory_free(torch.device("cpu")) < 6 * 2**30: pytest.skip("needs room for a 4 GiB pool")
    pool = KVPool(1, 2**20 // 64 + 1, 64, 8, 128, "cpu", torch.bfloat16)
    assert pool.kv.numel() > 2**31
    gen = torch.Generator().manual_seed(0)
    spans, outs = [(0, 5), (5, 6), (6, 9)], []
    q, k, v = (torch.randn(9, h, 128, generator=gen).bfloat16() for h in (16, 8, 8))
    for first in (0, pool.num_slots - 64 - 32):
        table = create_page_table(1, 32, "cpu")
        table[0] = torch.arange(first, first + 32)
        if first: table[0, :9] = table[0, :9].flip(0) # not a run: gathered
        backend, out = TorchAttention(None, pool, table), []
        for start, end in spans:
            ctx = ForwardContext("mixed", [start], [end], torch.tensor([0]), torch.zeros(end - start).long(), torch.arange(start, end),
                                 table[0, start:end].long(), torch.tensor([end - start - 1]))
            backend.prepare(ctx)
            out.append(backend.forward(q[start:end], k[start:end], v[start:end], 0, ctx))
        outs.append(torch.cat(out))
    assert torch.equal(*outs)

def test_backends_by_name():
    pool, table = KVPool(1, 2, 4, 2, 8, "cpu", torch.float32), create_page_table(1, 8, "cpu")
    for name in ("auto", "torch", TorchAttention): assert isinstance(make_backend(name, None, pool, table), TorchAttention)
    if can_loop("cpu", torch.float32):
        assert type(make_backend("auto", None, pool, table)) is (NumbaAttention if attention.openmp() or torch.get_num_threads() == 1 else TorchAttention)
        assert type(make_backend("numba", None, pool, table)) is NumbaAttention and type(make_backend("torch", None, pool, table)) is TorchAttention
    assert isinstance(make_backend("torch", None, pool, table), AttentionBackend)
    with pytest.raises(TypeError, match="tuple is no AttentionBackend: it lacks prepare, forward"): make_backend(lambda *args: args, 1, pool, table)
    for name in ("triton", "flash"):
        with pytest.raises(ValueError, match=name): make_backend(name, None, pool, table)

TINY = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=6, num_key_value_heads=2, head_dim=8, max_position_embeddings=128, rms_norm_eps=1e-5, rope_theta=10000.0,
            tie_word_embeddings=True)

def tiny_model():
    model = create_model(ModelConfig.from_dict(TINY), TorchOps())
    dummy_weights(model, "cpu", torch.float64, seed=1)
    for p in model.parameters(): p.data.mul_(8 if p.dim() > 1 else 1) # spread the logits
    return model

@torch.inference_mode()
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_paged_generation_equals_the_naive_loop(page_size):
    "Staggered requests: each joins while the others decode, so that batches are prefill, mixed and decode"
    model, rng = tiny_model(), random.Random(0)
    prompts = [[rng.randrange(97) for _ in range(n)] for n in (5, 1, 17, 30)]
    want = [generate_naive(model, p, 12) for p in prompts]
    pool = KVPool(3, sum(pages_needed(len(p) + 12, page_size) for p in prompts), page_size, 2, 8, "cpu", torch.float64)
    pool.kv.fill_(torch.nan)
    table, alloc = create_page_table(4, 64, "cpu"), PageAllocator(pool.num_pages)
    backend = TorchAttention(model.config, pool, table)
    tokens, pages, cached = [list(p) for p in prompts], [[] for _ in prompts], [0] * 4
    for step in range(20):
        live = [i for i in range(4) if 2 * i <= step and len(tokens[i]) < len(prompts[i]) + 12]
        if not live: break
        for i in live:
            pages[i] += alloc.allocate(pages_needed(len(tokens[i]), page_size) - len(pages[i]))
            table[i, :len(tokens[i])] = torch.from_numpy(slots_of(pages[i], page_size, 0, len(tokens[i]))).int()
        spans = [(cached[i], len(tokens[i])) for i in live]
        ends = torch.tensor([e - c for c, e in spans]).cumsum(0)
        ctx = ForwardContext("mixed", [c for c, _ in spans], [e for _, e in spans], torch.tensor(live),
            torch.tensor([t for i, (c, e) in zip(live, spans) for t in tokens[i][c:e]]), torch.cat([torch.arange(c, e) for c, e in spans]),
            torch.cat([table[i, c:e].long() for i, (c, e) in zip(live, spans)]), ends - 1)
        backend.prepare(ctx)
        for i, new in zip(live, model(ctx, backend).argmax(-1).tolist()):
            cached[i] = len(tokens[i])
            tokens[i].append(new)
    assert [t[len(p):] for t, p in zip(tokens, prompts)] == want


def test_the_exercise_takes_another_backend_and_says_where_a_broken_one_fails():
    "One query at a time is a right answer; a backend that forgets what is cached fails at the first decode step"
    from minisgl_edu.checks import solved_or_not
    from plugins import LoopAttention
    class Forgetful(LoopAttention):
        def forward(self, q, k, v, layer_id, ctx):
            out = super().forward(q, k, v, layer_id, ctx)
            return out if ctx.phase == "prefill" else torch.zeros_like(out)
    class Flat(LoopAttention):
        def forward(self, q, k, v, layer_id, ctx): return super().forward(q, k, v, layer_id, ctx).flatten(1)
    assert solved_or_not("own_backend", LoopAttention).status == "solved"
    for broken, said in ((Forgetful, "token 1 is"), (Flat, "shaped like q")):
        found = solved_or_not("own_backend", broken)
        assert found.status == "wrong" and said in found.reason, found
