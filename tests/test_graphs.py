"""Decode graphs: padding, stale buffers and the dummy page, by the stand-in that takes the graph's path on the CPU.

Before every replay the static tensors are poisoned, as if an unlucky step had left them: what is not filled anew shows."""
import logging

import numpy as np, pytest, torch
from torch.utils._pytree import tree_leaves

from conftest import greedy
from minisgl_edu import graphs
from minisgl_edu.core import ForwardContext, SamplingParams
from minisgl_edu.attention import NumbaAttention, TorchAttention
from minisgl_edu.engine import Engine, EngineConfig
from minisgl_edu.graphs import graph_sizes, largest_captured
from minisgl_edu.layers import Memory, NumbaOps, TorchOps, can_loop, openmp, recording
from minisgl_edu.overlap import OverlapScheduler
from minisgl_edu.scheduler import Scheduler
from plugins import LoopAttention
from test_kernels import run_python

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WORK = [([5, 9, 2, 44], 9), ([17], 12), (list(range(3, 40)), 5), ([7] * 15, 2), ([1, 2, 3, 4, 5, 6, 7, 8], 7), (list(range(100, 117)), 20)]


class Capturable:
    capturable = True


class Model:
    def __init__(self, attention, **kw): self.attention = attention; self.__dict__.update(kw)


def poison(engine):
    "Before each replay: indices that are in no table, scores that are no numbers"
    runner, replay = engine.graphs, engine.graphs.replay
    def poisoned(ctx):
        runner.inputs.fill_(2**40)
        runner.logits.fill_(torch.nan)
        return replay(ctx)
    runner.replay = poisoned


def tokens_of(engine, work=WORK, loop=Scheduler, abort=None, late=()):
    "Output tokens by request; `abort` = (uid, step) ends one early, `late` requests join at step 4"
    engine.stream.submit(lambda: engine.pool.kv[:, :engine.dummy_page * engine.page_size].fill_(torch.nan)).synchronize()
    if engine.graphs: poison(engine)
    s, out, step = loop(engine), {}, 0
    for uid, (ids, n) in enumerate(work): s.add(uid, ids, greedy(n))
    while s.has_work:
        if abort and step == abort[1]: s.abort(abort[0])
        if step == 4:
            for uid, (ids, n) in enumerate(late, len(work)): s.add(uid, ids, greedy(n))
        for e in s.step():
            assert e.finish_reason != "error", e.error
            out.setdefault(e.uid, [])
            if e.token_id is not None: out[e.uid].append(e.token_id)
        step += 1
    s.check_integrity()
    stats = s.stats()
    s.close()
    return out, stats


# ---- the ladder, and who may climb it --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("max_bs, sizes", [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (12, [1, 2, 4, 8, 12]),
                                           (24, [1, 2, 4, 8, 16, 24]), (25, [1, 2, 4, 8, 16, 24, 25])])
def test_ladder(max_bs, sizes): assert graph_sizes(max_bs) == sizes


def test_how_far_the_ladder_goes(caplog):
    ours, theirs, stubborn = Model(Capturable()), Model(LoopAttention(None, None, None)), Model(Capturable(), capturable=False)
    assert largest_captured(None, 64, CPU, ours) == 0 == largest_captured(0, 64, CUDA, ours)
    assert largest_captured(None, 64, CUDA, ours) == 64 and largest_captured(None, 1000, CUDA, ours) == 256
    assert largest_captured(7, 64, CPU, theirs) == 7 and largest_captured(100, 64, CUDA, ours) == 64
    with pytest.raises(ValueError, match="cuda_graph_max_bs=8.*LoopAttention.*capturable.*triton"): largest_captured(8, 64, CUDA, theirs)
    with pytest.raises(ValueError, match="cuda_graph_max_bs=8.*Model.*capturable"): largest_captured(8, 64, CUDA, stubborn)
    assert not caplog.text
    with caplog.at_level(logging.WARNING): assert largest_captured(None, 64, CUDA, theirs) == 0
    assert "run eagerly" in caplog.text and "LoopAttention" in caplog.text


def test_off_by_default_on_the_cpu_and_when_asked(make_engine):
    assert make_engine().graphs is None and make_engine(cuda_graph_max_bs=0).graphs is None
    assert make_engine(cuda_graph_max_bs=100).graphs.sizes == [1, 2, 4, 8]   # 8 rows: no larger batch exists


# ---- F29 --------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("page_size", [1, 16])
def test_padding_rows_are_harmless_and_always_available(make_engine, page_size):
    "Five requests whose next slots use up the pool, in a graph for eight"
    lens, n = (3, 9, 1, 12, 14), 3                                     # every prompt, and n - 1 tokens after it: one page of 16, or all pages of 1
    num_pages = 5 if page_size == 16 else sum(lens) + 5 * (n - 1)
    kw = dict(page_size=page_size, num_pages=num_pages, max_seq_len=17, cache="naive")
    work = [(list(range(10, 10 + k)), n) for k in lens]
    plain, _ = tokens_of(make_engine(**kw), work)
    engine = make_engine(cuda_graph_max_bs=8, **kw)
    assert engine.graphs.sizes == [1, 2, 4, 8]
    forward, prepare, seen, dummy_slot = engine.forward_batch, engine.backend.prepare, [], num_pages * page_size
    def watch(ctx):
        prepare(ctx)
        if ctx.phase == "decode": seen.append(ctx)
    def forward_batch(ctx, args):
        "Nothing but the step's slots and the dummy slot may change"
        before = engine.pool.kv.nan_to_num(7.0).clone()
        out = forward(ctx, args)
        changed = set((engine.pool.kv.nan_to_num(7.0) != before).flatten(2).any(2).any(0).nonzero().flatten().tolist())
        assert changed <= set(ctx.out_loc.tolist()) | {dummy_slot} and changed >= set(ctx.out_loc.tolist())
        if ctx.phase == "decode": used.append(len(engine_pages()))
        return out
    engine.backend.prepare, engine.forward_batch, used = watch, forward_batch, []
    engine_pages = lambda: {int(s) // page_size for r in range(5) for s in set(engine.page_table[r].tolist())} - {num_pages}
    padded, _ = tokens_of(engine, work)
    assert padded == plain and [len(t) for t in padded.values()] == [n] * 5
    assert engine.graphs.replayed == {8: n - 1} and len(seen) == n - 1
    assert max(used) == num_pages                                      # the last step filled the pool
    last = seen[-1]
    assert last.rows.tolist()[5:] == [8] * 3 and all(0 <= t < 128 for t in last.input_ids.tolist())
    assert last.positions.tolist()[5:] == [0] * 3 and last.device_lens == [k + n - 1 for k in lens] + [1] * 3
    assert last.out_loc.tolist()[5:] == [dummy_slot] * 3 and dummy_slot not in last.out_loc.tolist()[:5]
    assert sum(g.end - g.start for g in last.metadata.groups) == 8    # the metadata covers all rows


# ---- the same tokens ----------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def plain(tiny_model_dir):
    "What the plain loop gives without graphs"
    engine = Engine(EngineConfig(model=str(tiny_model_dir), dtype="float64", device="cpu", num_pages=64, max_running_requests=8))
    yield tokens_of(engine, WORK, late=WORK[::-1])[0]
    engine.close()


@pytest.mark.parametrize("loop", [Scheduler, OverlapScheduler])
@pytest.mark.parametrize("page_size, largest", [(1, 8), (16, 8), (16, 3), (3, 1)])
def test_tokens_do_not_depend_on_graphs(make_engine, plain, loop, page_size, largest):
    "Batches that grow, shrink, and leave the ladder; above it the step is eager"
    engine = make_engine(page_size=page_size, num_pages=-(-1024 // page_size), cuda_graph_max_bs=largest)
    tokens, stats = tokens_of(engine, WORK, loop, late=WORK[::-1])
    assert tokens == plain
    replays = sum(engine.graphs.replayed.values())
    assert replays == stats["decode_steps"] if largest == 8 else 0 < replays < stats["decode_steps"]
    assert set(engine.graphs.replayed) == set(engine.graphs.sizes)


@pytest.mark.parametrize("loop", [Scheduler, OverlapScheduler])
def test_retraction_and_abort(make_engine, plain, loop):
    "Few pages, optimistic admission: requests are pushed back and come again; one leaves half-way"
    engine = make_engine(page_size=4, num_pages=12, max_seq_len=48, admission="optimistic", cuda_graph_max_bs=8)
    tokens, stats = tokens_of(engine, WORK, loop, abort=(1, 7), late=WORK[::-1])
    assert stats["retracted"] > 0 and len(tokens[1]) < len(plain[1]) and tokens[1] == plain[1][:len(tokens[1])]
    assert {u: t for u, t in tokens.items() if u != 1} == {u: t for u, t in plain.items() if u != 1}
    assert len(engine.graphs.replayed) > 2


def test_mixed_and_prefill_steps_are_eager(make_engine, plain):
    engine = make_engine(policy="mixed", max_prefill_length=8, cuda_graph_max_bs=8)
    tokens, stats = tokens_of(engine, WORK, late=WORK[::-1])
    assert tokens == plain and stats["mixed_steps"] > 0 and sum(engine.graphs.replayed.values()) == stats["decode_steps"]


def test_a_readers_backend_takes_part_on_the_cpu(make_engine, plain):
    engine = make_engine(attention_backend=LoopAttention, cuda_graph_max_bs=8)
    assert tokens_of(engine, WORK, late=WORK[::-1])[0] == plain and engine.graphs.replayed


def test_a_step_that_breaks_leaves_the_next_one_whole(make_engine, plain):
    "The static tensors are half-filled when a step fails; nobody else sees it"
    engine = make_engine(cuda_graph_max_bs=8)
    s, model, calls = Scheduler(engine), engine.model.forward, []
    def broken(*args): calls.append(1 / (len(calls) != 3)); return model(*args)
    engine.model.forward = broken
    s.add(0, [1, 2, 3], greedy(9))
    events = [e for _ in range(12) if s.has_work for e in s.step()]
    assert events[-1].finish_reason == "error"
    del engine.model.forward
    assert tokens_of(engine, WORK, late=WORK[::-1])[0] == plain


# ---- what a graph freezes, the stand-in freezes -----------------------------------------------------------------------------------

class FromTheHost(TorchAttention):
    "Says it can be captured, and reads the host's lengths all the same"
    capturable = True


def test_lengths_from_the_host_are_frozen(make_engine, plain):
    "A backend that breaks its promise is found on the CPU: it sees the bounds, not the lengths"
    with pytest.raises((AssertionError, IndexError)): assert tokens_of(make_engine(attention_backend=FromTheHost, cuda_graph_max_bs=8))[0] == plain


def test_logits_are_one_tensor_that_stays(make_engine):
    "Every replay answers in the same memory: whoever wants to keep scores copies them"
    engine, places = make_engine(cuda_graph_max_bs=8), set()
    logits = engine.logits
    def watch(ctx):
        out = logits(ctx)
        if ctx.phase == "decode": places.add((out.data_ptr(), out.dtype)); assert len(out) == len(ctx.rows)
        return out
    engine.logits = watch
    tokens_of(engine)
    assert places == {(engine.graphs.logits.data_ptr(), torch.float64)}


class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
    "Names of the operations that ran inside"
    def __init__(self): super().__init__(); self.names = set()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().split("::")[1].split(".")[0])
        return func(*args, **(kwargs or {}))


# A value on the host, a shape that depends on values, a tensor made from Python numbers: a recording fails on them, or freezes them
NOT_RECORDABLE = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "_unique2", "lift", "lift_fresh",
                  "lift_fresh_copy", "scalar_tensor", "pin_memory", "_pin_memory"}


class Tape(Recorded):
    "A graph of PyTorch operations: replaying runs them again on the same tensors, and no Python of the step"
    def __init__(self): super().__init__(); self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.ops.append((func, args, kwargs or {}, out))
        return out

    def replay(self):
        for func, args, kwargs, out in self.ops:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs))):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr(): old.copy_(new)  # else a view, or in place


class Dense(LoopAttention):
    "Keeps the promise: a decode step attends to whole rows, masked by the positions, with no length from the host"
    capturable = True

    def forward(self, q, k, v, layer_id, ctx):
        if ctx.phase != "decode": return super().forward(q, k, v, layer_id, ctx)
        keys, values = self.pool.k[layer_id], self.pool.v[layer_id]
        keys.index_copy_(0, ctx.out_loc, k), values.index_copy_(0, ctx.out_loc, v)
        slots = self.page_table[ctx.rows].long()
        seen = torch.arange(slots.shape[1]) <= ctx.positions[:, None]
        slots = torch.where(seen, slots, slots[:, :1])
        k_all, v_all = (t[slots].repeat_interleave(q.shape[1] // k.shape[1], 2) for t in (keys, values))
        scores = torch.einsum("bhd,bnhd->bhn", q, k_all) / q.shape[-1]**0.5
        return torch.einsum("bhn,bnhd->bhd", scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1), v_all)


def tapes(engine):
    "Record every size's step for good: what a CUDA graph would freeze is frozen"
    def record():
        recorded = {}
        for size, step in engine.graphs.graphs.items():
            step()  # tables are made before
            with Tape() as recorded[size]: step()
        return recorded
    out = []
    engine.stream.submit(lambda: out.append(record())).synchronize()
    engine.graphs.graphs = {size: tape.replay for size, tape in out[0].items()}
    return out[0]


def test_a_step_recorded_once_serves_every_batch(make_engine, plain):
    "The model's own code runs while recording and never again; it asks the host for nothing"
    engine = make_engine(attention_backend=Dense, cuda_graph_max_bs=8)
    recorded = tapes(engine)
    for tape in recorded.values(): assert len(tape.ops) > 40 and not tape.names & NOT_RECORDABLE, tape.names & NOT_RECORDABLE
    engine.graphs._step = None  # no Python of the step is left
    assert tokens_of(engine, WORK, late=WORK[::-1])[0] == plain
    assert set(engine.graphs.replayed) == {1, 2, 4, 8}


def test_a_tape_would_show_what_the_host_decides(make_engine, plain):
    "The test above can fail: a backend that takes lengths from the host answers as if they were those of the recording"
    class FromHost(Dense):
        def forward(self, q, k, v, layer_id, ctx): return LoopAttention.forward(self, q, k, v, layer_id, ctx)
    engine = make_engine(attention_backend=FromHost, max_seq_len=64, cuda_graph_max_bs=8)
    recorded = tapes(engine)
    assert tokens_of(engine, WORK, late=WORK[::-1])[0] != plain


def test_the_offline_api_takes_it(tiny_model_dir):
    "As a keyword of `LLM`; requests of different lengths, so that batches shrink through the sizes"
    from minisgl_edu.llm import LLM
    answers = []
    for largest in (0, 4):
        with LLM(str(tiny_model_dir), dtype="float64", device="cpu", num_pages=64, max_running_requests=8, cuda_graph_max_bs=largest) as llm:
            answers.append([o.token_ids for o in llm.generate([ids for ids, _ in WORK], [greedy(n) for _, n in WORK])])
    assert answers[0] == answers[1] and [len(t) for t in answers[0]] == [n for _, n in WORK]


# ---- the tape -----------------------------------------------------------------------------------------------------------------------

taped = pytest.mark.skipif(not can_loop("cpu", torch.float32) or not (openmp() or torch.get_num_threads() == 1), reason="needs numba")

def float_engine(model_dir, **kw):
    return Engine(EngineConfig(model=str(model_dir), dtype="float32", device="cpu", **dict(num_pages=64, max_running_requests=8) | kw))

@pytest.fixture(scope="module")
def eager(tiny_model_dir):
    engine = float_engine(tiny_model_dir, cuda_graph_max_bs=0)
    yield tokens_of(engine, WORK, late=WORK[::-1])[0]
    engine.close()

@taped
@pytest.mark.parametrize("kw", [dict(), dict(page_size=1, num_pages=1024), dict(cuda_graph_max_bs=8), dict(cuda_graph_max_bs=3), dict(policy="mixed", max_prefill_length=8),
                                dict(disable_overlap=False), dict(admission="optimistic", num_pages=14, page_size=4, max_seq_len=48)], ids=str)
def test_a_tape_gives_the_tokens_of_the_eager_engine(tiny_model_dir, eager, kw):
    engine = float_engine(tiny_model_dir, **kw)
    want = eager if "max_seq_len" not in kw else tokens_of(float_engine(tiny_model_dir, **kw, cuda_graph_max_bs=0), WORK, late=WORK[::-1])[0]
    loop = OverlapScheduler if kw.get("disable_overlap") is False else Scheduler
    assert tokens_of(engine, WORK, loop, late=WORK[::-1])[0] == want
    assert engine.graphs.taped and engine.graphs.replayed
    assert engine.graphs.sizes == (graph_sizes(kw["cuda_graph_max_bs"]) if "cuda_graph_max_bs" in kw else list(range(1, 9)))
    assert {len(tape.calls) for tape in engine.graphs.graphs.values()} == {4 + 10 * engine.model_config.num_layers}
    engine.close()

@taped
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_a_tape_is_played_by_any_team(tiny_model_dir, eager, threads):
    "Nobody passes a barrier early, and nobody waits there for ever, also with more threads than cores"
    engine = float_engine(tiny_model_dir)
    before = engine.stream.call(torch.get_num_threads)
    engine.stream.call(torch.set_num_threads, threads)
    try: assert tokens_of(engine, WORK, late=WORK[::-1])[0] == eager
    finally:
        engine.stream.call(torch.set_num_threads, before)
        engine.close()

@taped
def test_scores_of_a_tape_are_those_of_the_eager_step_to_the_last_bit(tiny_model_dir):
    "Sizes recorded in any order, on one memory, and played in turns"
    engine, rng = float_engine(tiny_model_dir), torch.Generator().manual_seed(0)
    def run():
        engine.pool.kv.normal_(generator=rng)
        for row in range(8): engine.page_table[row, :64] = torch.arange(64 * row, 64 * row + 64)
        for n in (3, 8, 1, 3, 5, 8, 2, 1):
            at, rows = torch.randint(0, 60, (n,), generator=rng), torch.randperm(8, generator=rng)[:n]
            ids, order = torch.randint(0, 100, (n,), generator=rng), torch.arange(n)
            ctx = lambda: ForwardContext("decode", at.tolist(), (at + 1).tolist(), rows, ids, at, 64 * rows + at, order)
            kv = engine.pool.kv.clone()
            got, after = engine.graphs.replay(ctx()).clone(), engine.pool.kv.clone()
            engine.pool.kv.copy_(kv)
            now = ctx()
            engine.backend.prepare(now)
            assert torch.equal(got, engine.model(now)) and torch.equal(after, engine.pool.kv), n
    engine.stream.submit(run).synchronize()
    engine.close()

@taped
@pytest.mark.parametrize("what, name", [(lambda x: x + 1, "aten.add"), (lambda x: x.clone(), "aten.clone"), (lambda x: x.zero_(), "aten.zero_"),
                                        (lambda x: x.view(4).sum().item(), "aten"), (lambda x: torch.zeros(4), "aten.zeros"), (lambda x: x.T.contiguous(), "aten")])
def test_a_tape_refuses_what_it_would_miss(what, name):
    "And leaves nothing behind: the next operation runs as ever"
    x = torch.ones(2, 2)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=f"a tape holds loops of ours only, and {name}"): graphs.Tape(lambda: (what(x), x)[1])
    assert recording.tape is None
    ops, weight, x = NumbaOps(), torch.ones(2), torch.ones(2, 2)
    tape = graphs.Tape(lambda: ops.rms_norm(x.view(4).view(2, 2)[:, :], weight, 1e-6))
    assert len(tape.calls) == 1 and torch.allclose(tape.play(), torch.ones(2, 2))

@taped
@pytest.mark.parametrize("family", [dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3"), dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2"),
                                    dict(architectures=["LlamaForCausalLM"], tie_word_embeddings=False, vocab_size=131, head_dim=20)], ids=lambda f: f["architectures"][0])
def test_every_family_without_experts_fits_on_a_tape(tmp_path, tiny_config, family):
    "Norms of single heads, biases, a head of its own, ragged panels: the tokens of the eager engine with PyTorch's operations"
    from minisgl_edu.checkpoint import save_random_model
    save_random_model(tmp_path, tiny_config | family, seed=1)
    runs = {}
    for name, kw in dict(torch=dict(attention_backend="torch"), eager=dict(cuda_graph_max_bs=0), tape={}).items():
        engine = float_engine(tmp_path, **kw)
        runs[name] = tokens_of(engine, WORK, late=WORK[::-1])[0]
        assert bool(engine.graphs) == (name == "tape") and (name != "tape" or engine.graphs.taped and max(engine.graphs.replayed) > 3)
        engine.close()
    assert runs["tape"] == runs["eager"] == runs["torch"]

class Watched(NumbaAttention):
    def forward(self, q, k, v, layer_id, ctx): return super().forward(q * 0.5, k, v, layer_id, ctx)

class ByNumPy(NumbaAttention):
    def forward(self, q, k, v, layer_id, ctx): return super().forward(torch.from_numpy(q.numpy() * np.float32(0.5)), k, v, layer_id, ctx)

@taped
def test_whoever_changes_our_parts_says_so_again(tiny_model_dir):
    "PyTorch or NumPy in a subclass would be missing from a tape: its steps are eager, unless it promises"
    runs = []
    for kw in (dict(attention_backend=Watched), dict(attention_backend=ByNumPy), dict(attention_backend=Watched, cuda_graph_max_bs=0)):
        engine = float_engine(tiny_model_dir, **kw)
        assert engine.graphs is None
        runs.append(tokens_of(engine, WORK)[0])
        engine.close()
    assert runs[0] == runs[1] == runs[2]
    class Ours(NumbaOps): pass
    class Promised(NumbaAttention): recordable = True
    assert NumbaOps().recordable and not Ours().recordable and not NumbaOps(TorchOps()).recordable and Promised.recordable and not Watched.recordable

@taped
def test_what_a_caller_holds_is_not_written_over_by_a_tape():
    "Large eager results and tapes do not share blocks"
    ops, x, weight = NumbaOps(), torch.ones(600, 600), torch.ones(600)
    tape = graphs.Tape(lambda: ops.rms_norm(x, weight, 1e-6))
    held = ops.rms_norm(2 * x.cumsum(0), weight, 1e-6)
    before = held.clone()
    x.fill_(-3.0)
    tape.play()
    assert torch.equal(held, before)

@taped
def test_a_tiny_engine_is_the_same_model_in_float32():
    from minisgl_edu.checks import tiny_llm
    answers = []
    for backend in ("torch", "auto"):
        with tiny_llm(dtype="float32", attention_backend=backend) as llm: answers.append(llm.generate([[5, 9, 2], [7]], greedy(8))[0].token_ids)
    assert answers[0] == answers[1]

@taped
def test_experts_get_no_tape(tmp_path, tiny_config):
    from minisgl_edu.checkpoint import save_random_model
    save_random_model(tmp_path, tiny_config | dict(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True), seed=1)
    engine = float_engine(tmp_path)
    assert engine.graphs is None and len(tokens_of(engine, WORK)[0]) == len(WORK)
    engine.close()

@taped
def test_memory_of_tapes_goes_round_and_never_away():
    memory = Memory()
    a, b = memory.empty((10, 10)), memory.empty((10, 10))
    assert a.data_ptr() != b.data_ptr()
    places, view = {a.data_ptr(), b.data_ptr()}, b[3]
    del a, b
    c = memory.empty((11, 9))
    assert c.data_ptr() in places and memory.empty((100,)).data_ptr() not in places, "the other is still seen by a view"
    assert memory.empty((1,)).numel() == 1 and memory.empty((0, 4)).shape == (0, 4)
    place = view.data_ptr() - 120
    del view
    assert memory.empty((128,)).data_ptr() == place

@taped
def test_what_is_recorded_where(make_engine, tiny_model_dir):
    "By default in float32 with our loops; not in float64, not by other parts, not where somebody said none"
    def recorded(**kw):
        engine = float_engine(tiny_model_dir, **kw)
        engine.close()
        return engine.graphs
    assert recorded().taped and recorded(attention_backend="numba").taped
    assert recorded(cuda_graph_max_bs=0) is None and recorded(attention_backend="torch") is None and recorded(attention_backend=LoopAttention) is None
    assert make_engine().graphs is None and not make_engine(cuda_graph_max_bs=2).graphs.taped

@taped
def test_two_engines_record_and_play_at_the_same_time(tiny_model_dir, eager):
    "Each thread has a tape of its own"
    from concurrent.futures import ThreadPoolExecutor
    engines = [float_engine(tiny_model_dir) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool: runs = list(pool.map(lambda e: tokens_of(e, WORK, late=WORK[::-1])[0], engines))
    assert runs == [eager, eager]
    for e in engines: e.close()

# ---- our own kernels ----------------------------------------------------------------------------------------------------------------

def interpreted_engine(model_dir):
    "Triton's backend, interpreted: lengths come from the device alone, however the batch was padded"
    run = {}
    for page_size in (1, 16):
        for largest in (0, 4):
            engine = Engine(EngineConfig(model=model_dir, dtype="float32", device="cpu", attention_backend="triton", page_size=page_size,
                num_pages=64 // page_size, max_running_requests=4, cuda_graph_max_bs=largest))
            assert engine.backend.capturable
            if largest:
                seen, step = Recorded(), engine.graphs._step
                def watch(ctx):
                    with seen: engine.backend.prepare(ctx)
                    step(ctx)
                engine.graphs.graphs = {size: (lambda ctx=graph.args[0]: watch(ctx)) for size, graph in engine.graphs.graphs.items()}
            run[page_size, largest] = tokens_of(engine, [([5, 9, 17, 33, 2, 7], 4), ([11], 3), ([3, 4], 2)], OverlapScheduler if page_size == 1 else Scheduler)[0]
            assert not largest or engine.graphs.replayed == {4: 1, 2: 1, 1: 1} and seen.names and not seen.names & NOT_RECORDABLE, seen.names
            engine.close()
    assert len({str(tokens) for tokens in run.values()}) == 1, run


def test_triton_backend(tiny_model_dir):
    run_python(f"import test_graphs; test_graphs.interpreted_engine({str(tiny_model_dir)!r})", interpret=True)


def cuda_engine(model_dir):
    "Captured on a GPU: the tokens of the eager engine, in float32"
    run = {}
    for largest in (0, 8):
        engine = Engine(EngineConfig(model=model_dir, dtype="float32", device="cuda", num_pages=64, max_running_requests=8, cuda_graph_max_bs=largest))
        run[largest] = tokens_of(engine, WORK, OverlapScheduler, late=WORK[::-1])[0]
        assert not largest or sum(engine.graphs.replayed.values()) > 10
        engine.close()
    assert run[0] == run[8], run


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda(tiny_model_dir):
    run_python(f"import test_graphs; test_graphs.cuda_engine({str(tiny_model_dir)!r})", interpret=False)
