"""The engine: its configuration, the size of its pool, and a batch that gives what the naive loop gives."""
import logging, subprocess, sys

import pytest, torch

from conftest import greedy
from minisgl_edu.core import Req, SamplingParams
from minisgl_edu.checkpoint import ModelConfig, load_weights, save_random_model
from minisgl_edu.distributed import single
from minisgl_edu.engine import Engine, EngineConfig, StaticBatch, kv_budget, parse_bytes, pick_parts, plan_pool
from minisgl_edu.kvcache import page_bytes
from minisgl_edu.attention import NumbaAttention, TorchAttention
from minisgl_edu.layers import NumbaOps, PackedOps, TorchOps, can_loop
from minisgl_edu.models import DenseAttention, create_model, generate_naive

CPU = torch.device("cpu")
WORK = [([5, 9, 2, 44], 9), ([17], 12), (list(range(3, 40)), 5), ([7] * 15, 1), ([1, 2, 3, 4, 5, 6, 7, 8], 7), (list(range(100, 117)), 20)]


@pytest.fixture(scope="module")
def naive(tiny_model_dir):
    "The naive loop's tokens for `WORK`: no cache, no batch, float64"
    config = ModelConfig.from_dir(tiny_model_dir)
    with torch.inference_mode():
        model = create_model(config, TorchOps(), DenseAttention(), single())
        load_weights(model, tiny_model_dir, CPU, torch.float64)
        return [generate_naive(model, ids, n) for ids, n in WORK]


@pytest.mark.parametrize("text, value", [(7, 7), ("7", 7), ("2GiB", 2 << 30), ("1.5 kb", 1500), ("512MB", 512 * 10**6), (" 3 MiB ", 3 << 20), ("2tib", 2 << 40)])
def test_parse_bytes(text, value): assert parse_bytes(text) == value


@pytest.mark.parametrize("bad", ["", "GiB", "2 gallons", "-1", "1e9", "2GiB2", 0, -5, True, 1.5, None, float("nan"), "0"])
def test_parse_bytes_refuses(bad):
    with pytest.raises(ValueError, match="kv_memory"): parse_bytes(bad, "kv_memory")


@pytest.mark.parametrize("field, bad, words", [
    ("page_size", 0, ">= 1"), ("page_size", "16", "integer"), ("page_size", 1.5, "integer"), ("page_size", True, "integer"),
    ("num_pages", 0, ">= 1"), ("max_running_requests", 0, ">= 1"), ("max_prefill_length", -1, ">= 1"), ("max_seq_len", 1, ">= 2"),
    ("memory_ratio", 0, "> 0"), ("memory_ratio", 1.1, "<= 1"), ("memory_ratio", float("nan"), "<= 1"), ("kv_memory", "lots", "2GiB"),
    ("kv_memory", 0, ">= 1"), ("dtype", "int8", "does not exist"), ("dtype", "fp32", "'float32'"), ("dummy_weights", "yes", "does not exist"),
    ("attention_backend", "flash", "does not exist"), ("cache", "lru", "does not exist"),
    ("policy", "fifo", "does not exist"), ("admission", "hope", "does not exist"),
    ("disable_overlap", 1, "disable_overlap"), ("cuda_graph_max_bs", True, "integer"), ("cuda_graph_max_bs", 8.0, "integer"),
    ("cuda_graph_max_bs", -1, ">= 0"), ("cuda_graph_max_bs", "8", "integer"), ("seed", -1, ">= 0")])
def test_bad_values_are_refused_by_name(field, bad, words):
    with pytest.raises(ValueError) as e: EngineConfig(**{field: bad})
    assert field in str(e.value) and words in str(e.value)


def test_num_pages_and_kv_memory_exclude_each_other():
    with pytest.raises(ValueError, match="num_pages or kv_memory"): EngineConfig(num_pages=4, kv_memory=10**6)


def test_what_is_there_already_is_accepted():
    EngineConfig(disable_overlap=True, cuda_graph_max_bs=0, cache="naive", attention_backend="torch", kv_memory="1GiB", dtype="float64")


def test_pool_never_larger_than_it_can_be_used(tiny_config):
    mc = ModelConfig.from_dict(tiny_config)
    one = page_bytes(mc, 16, torch.float32)
    plan = lambda budget, **kw: plan_pool(EngineConfig(page_size=16, **kw), mc, torch.float32, budget)
    assert plan(10 * one + one - 1).num_pages == 10                               # what fits
    assert plan(1 << 40, max_running_requests=3, max_seq_len=40).num_pages == 9   # 3 rows of 3 pages
    assert plan(1 << 40, max_running_requests=3).num_pages == 3 * 256 // 16       # the model's own limit
    assert plan(100 * one, max_running_requests=1, kv_memory=100 * one).num_pages == 100 # asked for: taken
    assert plan(1, num_pages=5)[::2] == (5, 80)                                   # 80 tokens cap the context of 256
    assert plan(1, num_pages=50).max_seq_len == 256 and plan(1, num_pages=50, max_seq_len=100).max_seq_len == 100


def test_impossible_pools_are_refused_with_numbers(tiny_config):
    mc = ModelConfig.from_dict(tiny_config)
    with pytest.raises(ValueError, match=r"1,000 bytes.*pages of 4,096 bytes"): plan_pool(EngineConfig(), mc, torch.float32, 1000)
    with pytest.raises(ValueError, match="cannot hold"): plan_pool(EngineConfig(page_size=1, num_pages=1), mc, torch.float32, 0)
    with pytest.raises(ValueError, match="max_seq_len=257.*256"): plan_pool(EngineConfig(max_seq_len=257, num_pages=99), mc, torch.float32, 0)


def test_budget():
    gib, cuda = 1 << 30, torch.device("cuda")
    assert kv_budget(EngineConfig(), CPU, 99, 8 * gib) == 2 * gib and kv_budget(EngineConfig(), CPU, 99, 99 * gib) == 4 * gib
    assert kv_budget(EngineConfig(memory_ratio=0.5), cuda, 80 * gib, 70 * gib) == 30 * gib
    assert kv_budget(EngineConfig(kv_memory="3GiB"), CPU, 0, 0) == kv_budget(EngineConfig(kv_memory="3GiB"), cuda, 0, 0) == 3 * gib


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_a_batch_gives_what_the_naive_loop_gives(make_engine, naive, page_size):
    engine = make_engine(page_size=page_size, num_pages=-(-512 // page_size))
    engine.stream.submit(lambda: (engine.pool.k[0].fill_(float("nan")), engine.pool.v[1].fill_(1e30))).synchronize() # nothing unwritten may count
    assert StaticBatch(engine, [(ids, greedy(n)) for ids, n in WORK]).run() == naive
    for (ids, n), tokens in zip(WORK, naive): assert StaticBatch(engine, [(ids, greedy(n))]).run() == [tokens]


def test_token_limit_and_end_tokens(make_engine, naive):
    engine = make_engine()
    ids, n = WORK[5]
    batch = StaticBatch(engine, [(ids, greedy(m)) for m in (1, 2, 5)])
    assert [len(out) for out in batch.run()] == [1, 2, 5] and {r.finish_reason for r in batch.reqs} == {"length"}
    third = next(t for i, t in enumerate(naive[5]) if i >= 2 and t not in naive[5][:i])
    engine.eos_token_ids = (third,)
    batch = StaticBatch(engine, [(ids, SamplingParams(temperature=0.0, max_tokens=n))])
    assert batch.run()[0][-1] == third and batch.reqs[0].finish_reason == "stop"


def test_a_batch_that_does_not_fit_is_refused(make_engine):
    engine = make_engine(num_pages=4, max_running_requests=2)
    with pytest.raises(ValueError, match="5 pages.*4 pages"): StaticBatch(engine, [([1] * 60, greedy(10))])
    with pytest.raises(ValueError, match="2 rows"): StaticBatch(engine, [([1], greedy(2))] * 3)


def test_small_pool_caps_the_context_and_says_so(make_engine, caplog):
    with caplog.at_level(logging.WARNING): engine = make_engine(num_pages=3, page_size=16)
    assert engine.max_seq_len == 48 and "48 tokens (3 pages of 16)" in caplog.text and "256" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING): assert make_engine(num_pages=3, max_seq_len=48).max_seq_len == 48
    assert not caplog.text


def test_shapes_and_reserved_places(make_engine):
    engine = make_engine(num_pages=10, page_size=4, max_running_requests=5, max_seq_len=30)
    assert engine.page_table.shape == (6, 32) and (engine.dummy_row, engine.dummy_page) == (5, 10)
    assert engine.pool.k[0].shape[0] >= 11 * 4 and engine.eos_token_ids == (2,) and engine.tp.size == 1
    assert engine.model.attention is engine.backend and engine.dtype == torch.float64


def test_auto_dtype_is_float32_on_the_cpu(make_engine):
    assert make_engine(dtype="auto").dtype == torch.float32


def test_attention_backend_may_be_a_class(make_engine, naive):
    from minisgl_edu.attention import TorchAttention
    class Counting(TorchAttention):
        prepared = 0
        def prepare(self, ctx): Counting.prepared += 1; super().prepare(ctx)
    engine = make_engine(attention_backend=Counting)
    assert StaticBatch(engine, [(WORK[0][0], greedy(9))]).run() == naive[:1] and isinstance(engine.backend, Counting)
    assert Counting.prepared == 9   # once a step


@pytest.mark.parametrize("field, part, words", [
    ("cache", object(), "cache cannot be an instance of object; use one of 'auto', 'radix', 'naive', or a class called as"),
    ("attention_backend", [], "attention_backend cannot be an instance of list; use one of 'auto', 'torch', 'numba', 'triton', or a class"),
    ("policy", object, "policy cannot be object; use one of 'prefill-first', 'decode-first', 'mixed', or an object (or a class of such) with")])
def test_what_cannot_be_a_part_is_named_by_its_kind(field, part, words):
    with pytest.raises(ValueError) as e: EngineConfig(**{field: part})
    assert words in str(e.value)


def test_triton_on_a_cpu_is_refused_in_a_line(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a GPU"): pick_parts("triton", CPU, torch.float32, True)


@pytest.mark.skipif(not can_loop("cpu", torch.float32), reason="needs numba")
def test_the_loops_are_for_float32(make_engine):
    assert type(make_engine(dtype="float32", attention_backend="numba").backend) is NumbaAttention
    with pytest.raises(ValueError, match="attention_backend='numba' needs the package numba, a CPU and float32; this is torch.float64 on cpu"):
        make_engine(dtype="float64", attention_backend="numba")
    for name, kinds in (("torch", (TorchAttention, (TorchOps, PackedOps))), ("numba", (NumbaAttention, NumbaOps))):
        engine = make_engine(dtype="float32", attention_backend=name)
        assert type(engine.backend) is kinds[0] and type(engine.model.head.ops) in (kinds[1] if name == "torch" else (kinds[1],))


@pytest.mark.skipif(not can_loop("cpu", torch.float32), reason="needs numba")
@pytest.mark.parametrize("options", [dict(page_size=1), dict(page_size=3, max_prefill_length=4), dict(page_size=16, disable_overlap=False, policy="mixed", max_prefill_length=5),
    dict(page_size=4, cuda_graph_max_bs=4), dict(page_size=2, admission="optimistic", num_pages=12)], ids=str)
def test_the_loops_answer_as_torch_does(tiny_model_dir, options):
    "Prompts, chunks, mixed steps, padding, preemption: the same tokens"
    from minisgl_edu.llm import LLM
    prompts = [list(range(3, 3 + n)) for n in (1, 7, 12, 2, 9)]
    def answers(backend):
        with LLM(str(tiny_model_dir), device="cpu", dtype="float32", attention_backend=backend, max_running_requests=4, **{"num_pages": 64, **options}) as llm:
            return [o.token_ids for o in llm.generate(prompts, greedy(8))]
    assert answers("numba") == answers("torch")


def test_dummy_weights_are_seeded_and_need_no_weight_file(tmp_path, tiny_model_dir):
    (tmp_path/"config.json").write_text((tiny_model_dir/"config.json").read_text())
    def tokens(seed):
        engine = Engine(EngineConfig(model=str(tmp_path), device="cpu", num_pages=8, dummy_weights=True, seed=seed))
        try: return StaticBatch(engine, [([1, 2, 3], greedy(8))]).run(), float(sum(p.double().sum() for p in engine.model.parameters()))
        finally: engine.close()
    assert tokens(1) == tokens(1) and tokens(1)[1] != tokens(2)[1]


def test_forward_outside_the_stream_is_refused(make_engine):
    with pytest.raises(AssertionError, match="engine.stream"): make_engine().forward_batch(None, None)


def test_two_engines_live_in_one_process(make_engine, naive):
    a, b = make_engine(page_size=1, num_pages=256), make_engine(page_size=16)
    one, two = StaticBatch(a, [(ids, greedy(n)) for ids, n in WORK]), StaticBatch(b, [(ids, greedy(n)) for ids, n in WORK[::-1]])
    while one.step() or two.step(): pass
    assert [r.output_ids for r in one.reqs] == naive == [r.output_ids for r in two.reqs][::-1]


def test_close_ends_the_thread_and_may_be_repeated(make_engine):
    engine = make_engine()
    thread = engine.stream._thread
    engine.close(); engine.close()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"): engine.stream.submit(int)


@pytest.mark.parametrize("breakage, words", [
    (lambda d: (d/"model.safetensors").write_bytes(b"not safetensors"), "model.safetensors"),
    (lambda d: (d/"model.safetensors").unlink(), "model.safetensors"),
    (lambda d: (d/"config.json").unlink(), "config.json")])
def test_a_broken_directory_fails_with_one_clear_line_and_leaves_no_thread(tmp_path, tiny_config, breakage, words):
    import threading
    path = save_random_model(tmp_path/"m", tiny_config)
    breakage(path)
    before = threading.active_count()
    with pytest.raises((ValueError, FileNotFoundError)) as e: Engine(EngineConfig(model=str(path), device="cpu", num_pages=4))
    assert words in str(e.value) and str(path) in str(e.value) and threading.active_count() == before


def test_unknown_device_is_refused(tiny_model_dir):
    with pytest.raises(ValueError, match="quantum"): Engine(EngineConfig(model=str(tiny_model_dir), device="quantum"))
