"""DESIGN.md's invariants under random schedules, on a tiny float64 model: lengths, pages, locks, order, liveness, exactly one end.

A machine adds requests, steps, aborts, stops, and breaks the forward pass at random, with any page size, pool, budget, policy, cache,
admission, loop and attention backend; every pair of these choices is run. `stress.py` runs the same machine for as long as you like.
After every step each page and row is in one place; at the end every request has ended once, nothing is held, and its tokens are
those of the same request alone and of the naive loop without a KV cache."""
import functools, itertools

import numpy as np, pytest, torch
from hypothesis import Phase, seed as with_seed, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from minisgl_edu.core import SamplingParams
from minisgl_edu.checkpoint import ModelConfig, load_weights
from minisgl_edu.distributed import single
from minisgl_edu.engine import Engine, EngineConfig
from minisgl_edu.layers import TorchOps
from minisgl_edu.models import DenseAttention, create_model, generate_naive
from minisgl_edu.overlap import OverlapScheduler
from minisgl_edu.scheduler import Scheduler
from plugins import DecodeFirst, Lazy, LoopAttention, PageChainCache

EOS, LONGEST = tuple(range(0, 128, 11)), 12   # end tokens so common that many answers stop early; output tokens at most
COUNTS = {"steps": 0, "events": 0}


def prompt_of(length, seed):
    "Prompts of one seed share their beginnings, so that a prefix cache finds something"
    return np.random.default_rng(seed).integers(3, 128, length).tolist()


class World:
    "Engines by configuration, and the two oracles: the naive loop, and the request alone"
    def __init__(self, model_dir):
        self.model_dir, self.engines = str(model_dir), {}
        self.alone = functools.lru_cache(None)(self.alone)
        self.naive = functools.lru_cache(None)(self.naive)
        self.model = create_model(ModelConfig.from_dir(model_dir), TorchOps(), DenseAttention(), single())
        load_weights(self.model, model_dir, torch.device("cpu"), torch.float64)

    def engine(self, page_size, num_pages, rows, backend="torch", graphs=0):
        key = page_size, num_pages, rows, backend, graphs
        if key not in self.engines:
            self.engines[key] = Engine(EngineConfig(model=self.model_dir, dtype="float64", device="cpu", page_size=page_size,
                num_pages=num_pages, max_running_requests=rows, attention_backend=backend, cuda_graph_max_bs=graphs))
            self.engines[key].eos_token_ids = EOS
        return self.engines[key]

    def scheduler(self, page_size, num_pages, rows, budget=2048, policy="prefill-first", cache="naive", backend="torch", admission="reserve", overlap=False, graphs=0):
        engine = self.engine(page_size, num_pages, rows, backend, graphs)
        for name, value in dict(max_prefill_length=budget, policy=policy, cache=cache, admission=admission).items(): setattr(engine.config, name, value)
        engine.stream.submit(lambda: engine.pool.kv[:, :num_pages * page_size].fill_(torch.nan)).synchronize()  # reading an unwritten slot shows
        return (OverlapScheduler if overlap else Scheduler)(engine)

    def naive(self, prompt):
        with torch.inference_mode(): return generate_naive(self.model, prompt, LONGEST)

    def alone(self, prompt, params):
        s = self.scheduler(16, 32, 1)
        s.add(0, prompt, params)
        events = [e for _ in range(LONGEST) if s.has_work for e in s.step()]
        return [e.token_id for e in events], events[-1].finish_reason

    def expected(self, prompt, params):
        "Tokens and finish reason: by the naive loop if it can say, else alone"
        if not params.is_greedy: return self.alone(prompt, params)
        tokens = self.naive(prompt)[:params.max_tokens]
        end = next((i for i, t in enumerate(tokens) if t in EOS), None) if not params.ignore_eos else None
        want = (tokens, "length") if end is None else (tokens[:end + 1], "stop")
        assert self.alone(prompt, params) == want
        return want

    def close(self):
        for e in self.engines.values(): e.close()


@pytest.fixture(scope="module")
def world(tiny_model_dir):
    w = World(tiny_model_dir)
    yield w
    w.close()


class Book:
    "Keeps what a client would see, and complains at once when it should not see it"
    def __init__(self, world, scheduler):
        self.world, self.s = world, scheduler
        self.asked, self.tokens, self.reason, self.aborted, self.stopped, self.failed = {}, {}, {}, set(), set(), set()
        self.was_broken = False

    def add(self, prompt, params):
        uid = len(self.asked)
        self.asked[uid], self.tokens[uid] = (tuple(prompt), params), []
        self.s.add(uid, prompt, params)

    def drop(self, uid, silent):
        if uid in self.reason or uid in self.stopped: pass     # it ended already: nothing happens
        elif silent and uid not in self.aborted: self.stopped.add(uid)
        elif not silent: self.aborted.add(uid)
        (self.s.stop if silent else self.s.abort)(uid)

    def step(self, broken=False):
        COUNTS["steps"] += 1
        engine = self.s.engine
        if broken: engine.forward_batch = lambda ctx, args: 1 / 0  # shadows the method
        try: events = self.s.step()
        finally:
            if broken: engine.stream.synchronize()  # whatever was launched meets the broken forward
            engine.__dict__.pop("forward_batch", None)
        self.was_broken |= broken
        if self.was_broken: self.failed |= {e.uid for e in events if e.finish_reason == "error"}
        for e in events:
            COUNTS["events"] += 1
            assert e.uid not in self.reason and e.uid not in self.stopped, f"news after the end: {e}"
            assert e.cached_tokens < e.prompt_tokens == len(self.asked[e.uid][0])
            if e.token_id is not None:
                assert e.uid not in self.aborted, f"a token after the abort: {e}"
                self.tokens[e.uid].append(e.token_id)
            if e.finish_reason: self.reason[e.uid] = e.finish_reason
        self.check()

    def check(self):
        "After every step: pages, rows, lengths, the rows on the device"
        s = self.s
        s.check_integrity()
        stats, reqs = s.stats(), s.holders()
        assert stats["pages_free"] + stats["pages_cached"] + sum(len(s.cache.owned(r)) for r in reqs) + sum(len(p) for *_, p in s.cache.parting) == stats["pages_total"]
        assert s.cache.in_cache == s.cache.kept(reqs)
        assert len({r.table_idx for r in reqs}) == len(reqs) == s.engine.dummy_row - stats["rows_free"]
        for r in reqs:
            assert 0 <= r.cached_len <= r.device_len <= r.max_device_len and (r.cached_len < r.device_len or r.is_chunk)
            assert len(r.pages) >= -(-r.cached_len // s.engine.page_size)
            assert not set(r.pages) & set(s.cache.allocator.free_pages), "a live row names a free page"
            if not s.launched: assert r.is_chunk or r.cached_len == len(r.input_ids) - 1  # between two plain steps

    def progress(self):
        "Tokens handed out and requests ended: what no schedule may hold up for ever"
        return sum(map(len, self.tokens.values())) + len(self.reason)

    def finish(self):
        "Run dry, and compare"
        last = self.progress()
        while self.s.has_work:
            for _ in range(64):  # the longest prompt and answer, token by token, and the pipe
                self.step()
                if not self.s.has_work or self.progress() > last: break
            else: raise AssertionError(f"no progress in 64 steps: {self.s.stats()}")
            last = self.progress()
        s, stats = self.s, self.s.stats()
        assert not s.has_work, f"does not end: {stats}"
        assert stats["pages_used"] == 0 and stats["rows_free"] == s.engine.dummy_row and s.cache.prefix_cache.protected_pages == 0
        assert set(self.reason) | self.stopped == set(self.asked) and not set(self.reason) & self.stopped
        for uid, (prompt, params) in self.asked.items():
            tokens, reason = self.world.expected(prompt, params)
            assert (self.reason.get(uid) == "error") == (uid in self.failed)
            if self.reason.get(uid) in ("stop", "length"): assert (self.tokens[uid], self.reason[uid]) == (tokens, reason), uid
            else: assert self.tokens[uid] == tokens[:len(self.tokens[uid])] and uid in self.aborted | self.stopped | self.failed


PARAMS = st.builds(lambda n, ignore, kind: SamplingParams(max_tokens=n, ignore_eos=ignore, **kind), st.integers(1, LONGEST), st.booleans(),
    st.sampled_from([dict(temperature=0.0)] * 4 + [dict(temperature=1.0, seed=3), dict(temperature=0.7, top_k=5, top_p=0.9, seed=4)]))
PROMPTS = st.builds(prompt_of, st.integers(1, 30), st.integers(0, 2))


CHOICES = dict(page_size=[1, 2, 3, 4, 16], budget=[1, 2, 7, 32, 2048], policy=["prefill-first", "decode-first", "mixed", DecodeFirst(), Lazy()],
    tokens=[48, 96, 192], rows=[1, 2, 3, 8], cache=["naive", "radix", PageChainCache], admission=["reserve", "optimistic"],
    overlap=[False, True], backend=["torch", LoopAttention], graphs=[0, 3, 8])


def pairs(case):
    "Every pair of choices in a case, by name and index"
    return set(itertools.combinations(((name, CHOICES[name].index(value)) for name, value in case.items()), 2))


def covering_cases(rng):
    "Cases that together hold every pair of choices: each time the best of 50 random ones, around a pair that is still missing"
    every = [(name, i) for name, values in CHOICES.items() for i in range(len(values))]
    missing, cases = {(a, b) for a, b in itertools.combinations(every, 2) if a[0] != b[0]}, []
    while missing:
        wanted = dict(min(missing))
        drawn = [{name: values[wanted.get(name, rng.integers(len(values)))] for name, values in CHOICES.items()} for _ in range(50)]
        cases.append(max(drawn, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(cases[-1])
    return cases


class Machine(RuleBasedStateMachine):
    "One scheduler from its first request to its last"
    world, case = None, {}  # choices that are made already; the others are drawn

    @initialize(drawn=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}))
    def start(self, drawn):
        kw = drawn | self.case
        page_size, tokens, rows = (kw.pop(name) for name in ("page_size", "tokens", "rows"))
        self.book = Book(self.world, self.world.scheduler(page_size, tokens // page_size, rows, **kw))

    @rule(prompt=PROMPTS, params=PARAMS)
    def arrive(self, prompt, params): self.book.add(prompt, params)

    @rule(prompts=st.lists(PROMPTS, min_size=2, max_size=6), params=PARAMS)
    def arrive_together(self, prompts, params):
        for p in prompts: self.book.add(p, params)

    @rule(n=st.integers(1, 6))
    def step(self, n):
        for _ in range(n): self.book.step()

    @precondition(lambda self: self.book.asked)
    @rule(data=st.data(), silent=st.booleans())
    def drop(self, data, silent):
        "Whoever it is: waiting, running, or ended long ago"
        self.book.drop(data.draw(st.sampled_from(sorted(self.book.asked)), label="uid"), silent)

    @precondition(lambda self: self.book.asked)
    @rule(data=st.data(), silent=st.booleans())
    def drop_in_flight(self, data, silent):
        "Its batch has been launched: what it holds must stay its own until that batch is done"
        if len(self.book.s.launched) > 1: return
        plan = self.book.s._schedule()
        if plan is None: return
        self.book.s._launch(plan)
        req = data.draw(st.sampled_from(plan.batch.reqs), label="request")
        held = list(req.pages)
        self.book.drop(req.uid, silent)
        assert held == req.pages and not set(held) & set(self.book.s.cache.allocator.free_pages)
        self.book.step()

    @rule()
    def break_the_forward(self): self.book.step(broken=True)

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "book"): self.book.check()

    def teardown(self):
        if hasattr(self, "book"): self.book.finish()


def run_machine(world, seed, examples, case={}):
    "Random schedules, the same for the same seed; returns the number of scheduler steps"
    before = COUNTS["steps"]
    machine = with_seed(seed)(type("Machine", (Machine,), dict(world=world, case=case)))
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=20, deadline=None, database=None,
        print_blob=False, phases=(Phase.generate, Phase.shrink)))
    return COUNTS["steps"] - before


def test_random_schedules(world):
    "Every pair of choices, and ten thousand scheduler steps"
    cases, seeds = covering_cases(np.random.default_rng(0)), itertools.count()
    steps = sum(run_machine(world, next(seeds), 3, case) for case in cases)
    while steps < 10_000: steps += run_machine(world, next(seeds), 20)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("cache", ["naive", PageChainCache])
def test_a_pool_of_two_requests_serves_fifty(world, page_size, cache):
    book = Book(world, world.scheduler(page_size, 64 // page_size, 8, cache=cache))
    rng = np.random.default_rng(5)
    for i in range(50):
        book.add(prompt_of(int(rng.integers(16, 21)), i % 3), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    most = 0
    while book.s.has_work:
        book.step()
        most = max(most, len(book.s.holders()))
    book.finish()
    assert book.s.stats()["ended_length"] == 50 and (most == 2 if cache == "naive" else most >= 2)


@pytest.mark.parametrize("what", [dict(policy=DecodeFirst()), dict(policy=Lazy()), dict(cache=PageChainCache), dict(backend=LoopAttention),
                                  dict(policy=DecodeFirst(), cache=PageChainCache, backend=LoopAttention)], ids=lambda d: "+".join(d))
def test_a_readers_own_parts(world, what):
    "Plugged in by the protocols of `core`, and the answers stay the same"
    book = Book(world, world.scheduler(4, 24, 4, **what))
    for i in range(16):
        book.add(prompt_of(5 + 3 * i % 20, i % 3), SamplingParams(temperature=0.0, max_tokens=1 + i % 12))
        if i % 3: book.step()
    book.finish()
    if "cache" in what: assert book.s.stats()["pages_cached"] > 0


def test_a_round_runs_with_the_parts_given(world):
    "`stress.py --cache ...`: what is given stays, the rest is drawn"
    seen = []
    class Seen(PageChainCache):
        def __init__(self, *args): super().__init__(*args); seen.append(type(self))
    assert run_machine(world, 0, 2, dict(cache=Seen, backend=LoopAttention)) > 0 and set(seen) == {Seen}


def test_parts_are_given_to_the_engine_config(world):
    policy = DecodeFirst()
    engine = Engine(EngineConfig(model=world.model_dir, dtype="float64", device="cpu", num_pages=16, policy=policy, cache=PageChainCache, attention_backend=LoopAttention))
    s = Scheduler(engine)
    assert s.policy is policy and isinstance(s.cache.prefix_cache, PageChainCache) and isinstance(engine.backend, LoopAttention)
    engine.close()


def test_page_size_and_batch_change_no_token(world):
    "The same requests, alone and together, in pages of every size and any budget"
    work = [(prompt_of(1 + 7 * i % 29, i % 3), SamplingParams(temperature=0.0, max_tokens=LONGEST, ignore_eos=i % 2 > 0)) for i in range(12)]
    for page_size, tokens, rows, budget in [(1, 64, 8, 16), (3, 96, 2, 2048), (16, 256, 12, 1), (64, 256, 3, 40)]:
        book = Book(world, world.scheduler(page_size, tokens // page_size, rows, budget=budget))
        for prompt, params in work: book.add(prompt, params)
        book.finish()


@pytest.mark.parametrize("policy", ["prefill-first", "decode-first", "mixed"])
@pytest.mark.parametrize("overlap", [False, True])
def test_duplicates_on_their_way_out_are_not_missed(world, policy, overlap):
    "A pool full to the last page: what admission promised includes the duplicates that still part"
    book = Book(world, world.scheduler(1, 24, 4, budget=8, policy=policy, cache="radix", overlap=overlap))
    for prompt, n in ((prompt_of(8, 0), 1), (prompt_of(8, 0), 2), (prompt_of(14, 1), 2)):
        book.add(prompt, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True))
    book.finish()


@pytest.mark.parametrize("policy", ["prefill-first", "decode-first", "mixed"])
@pytest.mark.parametrize("cache", ["naive", "radix"])
def test_a_stream_of_short_requests_does_not_starve_a_long_one(world, policy, cache):
    "Optimistic admission pushes back the youngest, never the oldest"
    book = Book(world, world.scheduler(1, 64, 8, budget=4, policy=policy, cache=cache, admission="optimistic"))
    book.add(prompt_of(50, 0), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    for i in range(300):
        while len(book.s.prefill.waiting) < 3: book.add(prompt_of(1, i), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        book.step()
        if 0 in book.reason: break
    assert book.reason.get(0) == "length"
    for uid in range(1, len(book.asked)): book.drop(uid, silent=False)
    book.finish()


def test_many_requests_in_a_pool_of_two(world):
    "Pages run out all the time, and nobody loses a token"
    for admission in ("reserve", "optimistic"):
        book = Book(world, world.scheduler(4, 16, 8, budget=16, cache="radix", admission=admission, overlap=True))
        rng = np.random.default_rng(6)
        for i in range(500):
            book.add(prompt_of(int(rng.integers(16, 21)), i % 7), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        book.finish()
        if admission == "optimistic": assert book.s.stats()["retracted"] > 0


def test_stress_counts_steps_and_names_the_seed_that_fails(monkeypatch, capsys):
    "The command line around the machine: enough rounds, one seed after another, and no quiet failure"
    import stress
    seeds, parts = [], []
    def round_of(world, seed, examples, own):
        seeds.append(seed)
        parts.append(own)
        if seed == 9: raise AssertionError("a page is lost")
        return 600
    monkeypatch.setattr(stress, "run_machine", round_of)
    assert stress.main(["--steps", "1000", "--seed", "3"]) == 0 and seeds == [3, 4]
    assert "no failure in 1,200 scheduler steps, 50 schedules, seeds 3 to 4" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="a page is lost"): stress.main(["--steps", "5000", "--seed", "7"])
    assert "FAILED with seed 9, after 1,200 steps" in capsys.readouterr().out
    assert stress.main(["--steps", "1", "--cache", "plugins:PageChainCache", "--policy", "plugins:Lazy"]) == 0
    assert parts[0] == {} and parts[-1] == dict(cache=PageChainCache, policy=Lazy)
    for bad in (["--steps", "0"], ["--seed", "-1"], ["--policy", "nowhere:Turns"], ["--policy", "plugins:NoSuch"]):
        with pytest.raises(SystemExit): stress.main(bad)
