"The simulator: virtual time is the arithmetic's, the scheduler is the real one, and every request ends once"
import math

import numpy as np, pytest

from minisgl_edu.checkpoint import ModelConfig
from minisgl_edu.core import RequestError, SamplingParams, random_workload
from minisgl_edu.device import PUBLISHED, Ceilings, roofline_ms, step_costs
from minisgl_edu.engine import Engine, EngineConfig
from minisgl_edu.overlap import OverlapScheduler
from minisgl_edu.scheduler import Scheduler
from minisgl_edu.simulator import (SLO, Arrival, Costs, VirtualEngine, VirtualStream, answer, bursts, chat_trace, heavy_tailed, make_trace, poisson, simulate)

SHAPE = ModelConfig.from_dict(dict(architectures=["LlamaForCausalLM"], vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048))
ROUND = Costs(schedule_us=900, request_us=0, launch_us=100, handle_us=500, copy_us=0, efficiency=1.0)  # host: 1 ms before a step, 0.5 ms for each token after it


def engine(costs=Costs(), step_ms=None, sheet="L4", **config):
    "A virtual engine; `step_ms(spans)` replaces the roofline"
    e = VirtualEngine(sheet, SHAPE, costs, **{"max_seq_len": 512, "num_pages": 256, "page_size": 4, **config})
    if step_ms: e.step_ms = step_ms
    return e


def mixed_trace(n=60, seed=0, slack=0):
    "Random arrivals, lengths and a few conversations"
    singles = make_trace(poisson(n, 200.0, seed), heavy_tailed(n, 40, 0.8, 200, seed), heavy_tailed(n, 12, 0.8, 60, seed + 1), 1000, seed)
    singles = [Arrival(a.at, a.prompt, a.output_len, a.output_len + slack * (i % 3)) for i, a in enumerate(singles)]
    shift = lambda a: Arrival(a.at, a.prompt, a.output_len, after=None if a.after is None else a.after + n, turn=a.turn)
    return singles + [shift(a) for a in chat_trace(bursts(4, 20.0, 2, seed), 3, 32, 16, 8, 0.05, 1000, seed)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("config", [dict(), dict(policy="mixed", max_prefill_length=16), dict(policy="decode-first", cache="naive", max_prefill_length=64),
                                    dict(admission="optimistic", num_pages=70, max_running_requests=12)], ids=lambda c: "+".join(c) or "default")
def test_every_request_ends_once_with_all_its_tokens(config, overlap):
    "Also answers that end before their `max_tokens`, and a pool that is too small for all"
    trace, e = mixed_trace(slack=7), engine(disable_overlap=not overlap, **config)
    result = simulate(e, trace)
    for a, r in zip(trace, result.requests):
        assert r.token_ids == answer(a.prompt, a.output_len, 1000) and len(r.times) == a.output_len
        assert r.times[0] > r.arrived_at and all(x < y for x, y in zip(r.times, r.times[1:]))
        if a.after is None: assert r.arrived_at == a.at
        else: assert r.arrived_at == result.requests[a.after].times[-1] + a.at
    stats = result.stats
    assert stats["ended_stop"] + stats["ended_length"] == len(trace) and stats["ended_stop"] > 0
    assert stats["pages_used"] == 0 and stats["rows_free"] == e.dummy_row
    assert result.num_tokens == sum(a.output_len for a in trace)
    assert all(u.held >= 0 and u.kept >= 0 and u.held + u.kept <= e.num_pages for u in result.pool)
    if "admission" in config: assert stats["retracted"] > 0
    if e.config.cache == "naive": assert all(r.cached_tokens == 0 for r in result.requests)


@pytest.mark.parametrize("overlap", [False, True])
def test_time_goes_forward(overlap):
    "The host is never in two places, the device neither, and a step starts after it was handed over"
    result = simulate(engine(disable_overlap=not overlap), mixed_trace())
    for s in result.steps: assert s.begun_at < s.launched_at <= s.started_at < s.done_at
    for a, b in zip(result.steps, result.steps[1:]):
        assert a.launched_at <= b.begun_at and a.done_at <= b.started_at
        if not overlap: assert a.done_at <= b.begun_at
    assert [u.at for u in result.pool] == sorted(u.at for u in result.pool)


def test_same_seed_same_run():
    one, two, other = (simulate(engine(policy="mixed"), mixed_trace(seed=seed)) for seed in (3, 3, 4))
    assert one.requests == two.requests and one.steps == two.steps and one.pool == two.pool
    assert one.requests != other.requests


def plans(kind, e, work):
    "Every step's phase, requests and spans"
    s, steps = kind(e), []
    for uid, (ids, params) in enumerate(work): s.add(uid, ids, params)
    while s.has_work:
        s.step()
        s.check_integrity()
        steps.append((s.last_batch.phase, [r.uid for r in s.last_batch.reqs], [tuple(x) for x in s.last_batch.spans]))
    s.close()
    return steps


@pytest.mark.parametrize("kind", [Scheduler, OverlapScheduler])
@pytest.mark.parametrize("policy", ["prefill-first", "decode-first", "mixed"])
def test_same_steps_as_a_real_engine(tiny_model_dir, kind, policy):
    "Requests, spans and rows of every step, under tight limits"
    limits = dict(page_size=4, num_pages=40, max_running_requests=6, max_prefill_length=16, policy=policy, admission="optimistic")
    real = Engine(EngineConfig(model=tiny_model_dir, device="cpu", dtype="float64", **limits))
    work = random_workload(20, 4, 30, 128, seed=2)
    want = plans(kind, real, work)
    real.close()
    assert plans(kind, VirtualEngine("H200", real.model_config, **limits), work) == want and len(want) > 60


def test_one_request_by_hand():
    "Prompt of 10 tokens, three tokens out, a step takes 4 ms: 1 ms of host, 4 of device, 0.5 of handling, three times"
    result = simulate(engine(ROUND, lambda spans: 4.0, disable_overlap=True), [Arrival(2.0, list(range(10)), 3)])
    assert np.allclose(result.requests[0].times, [2.0055, 2.0110, 2.0165])
    assert np.allclose(result.requests[0].ttft, 0.0055) and np.allclose(result.requests[0].tpot, 0.0055) and np.allclose(result.itl_ms(), 5.5)


def test_the_cost_model_is_that_of_chapter_02():
    "Bytes and FLOPs of the spans, over the stated efficiency; measured ceilings do as well as a data sheet"
    spans = [(0, 7), (20, 21)]
    for sheet in (PUBLISHED["A100"], Ceilings(30, 30, 0.3, 1, "cpu", PUBLISHED["A100"].dtype)):
        want = roofline_ms(step_costs(SHAPE, spans, sheet.dtype), sheet)
        assert engine(Costs(efficiency=0.5), sheet=sheet).step_ms(spans) == 2 * want
    result = simulate(engine(Costs(0, 0, 0, 0, 0, 1.0), disable_overlap=True), [Arrival(0.0, [1] * 7, 2)])
    assert np.allclose(result.requests[0].times, np.cumsum([engine(Costs(efficiency=1.0)).step_ms([s]) / 1e3 for s in ((0, 7), (7, 8))]))


@pytest.mark.parametrize("host_ms, device_ms", [(1.0, 4.0), (4.0, 1.0), (2.0, 2.0)])
def test_overlap_takes_the_longer_of_host_and_device(host_ms, device_ms):
    "A full decode step: plain adds, overlapped takes the maximum"
    costs = Costs(schedule_us=0, request_us=0, launch_us=host_ms * 750, handle_us=host_ms * 250, copy_us=0, efficiency=1.0)
    gaps = {plain: set(np.round(simulate(engine(costs, lambda spans: device_ms, disable_overlap=plain), [Arrival(0.0, [5, 6], 20)]).itl_ms()[4:-2], 6)) for plain in (True, False)}
    assert gaps == {True: {host_ms + device_ms}, False: {max(host_ms, device_ms)}}


def test_costs_at_their_extremes():
    "A host that costs nothing leaves the device no gap; a device that costs nothing leaves the host alone"
    free = simulate(engine(Costs(0, 0, 0, 0, 0, 1.0), lambda spans: 3.0), make_trace([0.0] * 4, [8] * 4, [6] * 4, 1000))
    assert np.allclose([s.done_at for s in free.steps], np.arange(1, 7) * 0.003)
    instant = simulate(engine(ROUND, lambda spans: 0.0, disable_overlap=True), [Arrival(0.0, [5], 4)])
    assert np.allclose(instant.requests[0].times, np.arange(1, 5) * 0.0015)


def test_extra_sync_gives_the_overlap_away():
    "The debugging switch works on virtual time too"
    def seconds(**kw): return simulate(engine(ROUND, lambda spans: 4.0, **kw), [Arrival(0.0, [5, 6], 20)]).seconds
    assert seconds() < seconds(extra_sync=True) <= seconds(disable_overlap=True) + 1e-9


def test_events_of_the_virtual_stream():
    "Done when the host's clock is there; a wait with a limit stops at the limit; errors reach whoever waits"
    stream = VirtualStream(ROUND)
    ctx = type("Ctx", (), dict(phase="decode", device_lens=[3], extend_lens=[1]))
    event = stream.submit(stream.charge, ctx, 0.004)
    assert not event.query() and math.isclose(stream.now, 0.001)
    with pytest.raises(TimeoutError): event.synchronize(timeout=0.001)
    assert math.isclose(stream.now, 0.002) and not event.query()
    event.synchronize()
    assert event.query() and math.isclose(stream.now, 0.0055)
    event.synchronize()
    assert math.isclose(stream.now, 0.0055), "results are handled once"
    before = stream.now
    failed = stream.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError): failed.synchronize()
    assert stream.now == before, "what is no step is free"


def test_a_failing_step_ends_its_requests_only():
    "The scheduler's own rule, on virtual time"
    e = engine(disable_overlap=True)
    s, good = Scheduler(e), e.step_ms
    s.add(0, [5, 6], SamplingParams(temperature=0.0, max_tokens=4))
    e.step_ms = lambda spans: 1 / 0
    assert [ev.finish_reason for ev in s.step()] == ["error"]
    e.step_ms = good
    assert len(simulate(e, [Arrival(0.0, [5, 6], 4)]).requests[0].times) == 4
    e.step_ms = lambda spans: 1 / 0
    with pytest.raises(RequestError, match="division"): simulate(e, [Arrival(0.0, [5, 6], 4)])


# --- traces -----------------------------------------------------------------------------------------------------------

def test_arrival_times():
    a = poisson(4000, 50.0, seed=1)
    assert (np.diff(a) > 0).all() and abs(a[-1] / 80 - 1) < 0.05 and (poisson(10, 50.0, 1) == a[:10]).all()
    assert abs(np.diff(a).std() / np.diff(a).mean() - 1) < 0.1, "exponential gaps: as wide as they are long"
    b = bursts(95, 50.0, 10, seed=1)
    assert len(b) == 95 and np.unique(b, return_counts=True)[1].tolist() == [10] * 9 + [5]


def test_heavy_tail():
    n = heavy_tailed(20000, 100, 1.0, 3000, seed=2)
    assert n.min() >= 1 and n.max() == 3000 and abs(np.median(n) - 100) < 5 and n.mean() > 1.4 * np.median(n)


def test_a_chat_repeats_itself():
    "A turn's prompt is all that was said, and what was said is what the simulator says; the cache finds it"
    trace = chat_trace([0.0, 0.3], 4, 40, 20, 16, 0.1, 1000, seed=5)
    result = simulate(engine(), trace)
    for i, a in enumerate(trace):
        assert a.prompt[:40] == trace[0].prompt[:40]
        if a.after is None: continue
        said = trace[a.after].prompt + result.requests[a.after].token_ids
        assert a.prompt[:len(said)] == said and a.turn == trace[a.after].turn + 1
        assert result.requests[i].cached_tokens == (len(said) - 1) // 4 * 4, "all but the last token, in whole pages"


# --- metrics ----------------------------------------------------------------------------------------------------------

def test_metrics_by_hand():
    "Two requests of 3 and 1 tokens, one after the other, 5.5 ms a token"
    result = simulate(engine(ROUND, lambda spans: 4.0, disable_overlap=True), [Arrival(0.0, [5, 6], 3), Arrival(1.0, [7], 1)])
    s = result.summary(SLO(ttft_ms=6, tpot_ms=5))
    assert math.isclose(result.seconds, 1.0055) and result.num_tokens == 4
    assert math.isclose(s["tokens_per_s"], 4 / 1.0055) and s["good_share"] == 0.5 and math.isclose(s["goodput_per_s"], 1 / 1.0055)
    assert math.isclose(s["ttft_p99_ms"], 5.5) and math.isclose(s["itl_p50_ms"], 5.5) and math.isclose(s["tpot_p99_ms"], 5.5 - 0.01 * 5.5)
    assert s["max_pages"] == 1 and result.summary()["good_share"] == 1
    alone = simulate(engine(), [Arrival(0.0, [7], 1)]).summary()
    assert math.isnan(alone["itl_p99_ms"]) and alone["requests"] == 1


# --- refusals ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arrival, words", [
    (Arrival(-1.0, [5], 2), "at must be >= 0"), (Arrival(float("nan"), [5], 2), "at must be"), (Arrival(0.0, [5], 0), "output_len must be >= 1"),
    (Arrival(0.0, [5], 2.5), "output_len must be an integer"), (Arrival(0.0, [5], 4, max_tokens=3), "max_tokens must be >= 4"),
    (Arrival(0.0, [5], 2, after=1), "after must be >= 0 and <= 0")], ids=lambda x: x if isinstance(x, str) else "")
def test_a_bad_arrival_is_named(arrival, words):
    with pytest.raises(ValueError, match=f"arrival 1: {words}"): simulate(engine(), [Arrival(0.0, [5], 2), arrival])


def test_refusals():
    with pytest.raises(ValueError, match="trace is empty"): simulate(engine(), [])
    with pytest.raises(RequestError, match="prompt has 600 tokens; the context holds 512"): simulate(engine(), [Arrival(0.0, [5] * 600, 2)])
    with pytest.raises(RequestError, match="token 0 is 1000"): simulate(engine(), [Arrival(0.0, [1000], 2)])
    with pytest.raises(ValueError, match="no data sheet for 'H300'.*'H200'"): engine(sheet="H300")
    for name in ("model", "dtype", "device", "attention_backend", "cuda_graph_max_bs", "dummy_weights", "seed"):
        with pytest.raises(ValueError, match=f"^{name}: nothing is computed"): engine(**{name: None})
    with pytest.raises(ValueError, match="policy"): engine(policy="nobody")
    with pytest.raises(ValueError, match="give num_pages or kv_memory"): VirtualEngine(Ceilings(30, 30, 0.3, 1, "cpu", PUBLISHED["L4"].dtype), SHAPE)
    large = ModelConfig.from_dict(dict(architectures=["LlamaForCausalLM"], vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192))
    with pytest.raises(ValueError, match="cannot hold two tokens"): VirtualEngine("L4", large)
    for bad, words in ((dict(schedule_us=-1), "schedule_us must be >= 0"), (dict(efficiency=0), "efficiency must be > 0 and <= 1"), (dict(efficiency=1.5), "efficiency must be > 0 and <= 1")):
        with pytest.raises(ValueError, match=words): Costs(**bad)


def test_memory_is_what_the_weights_leave():
    "As many pages as the memory holds, and never more than the rows can use; a context over the model's is refused"
    tight = VirtualEngine("L4", SHAPE, kv_memory="1MiB")
    assert tight.num_pages == 2**20 // (16 * 2 * 4 * 2 * 64 * 2)
    assert VirtualEngine("L4", SHAPE, max_running_requests=2, max_seq_len=100).num_pages == 2 * 7
    with pytest.raises(ValueError, match="over the model's limit of 2048"): VirtualEngine("H200", SHAPE, max_seq_len=4096)
