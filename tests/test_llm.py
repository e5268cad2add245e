"""The offline API: outputs, text increments, refusals, early ends, one thread at a time."""
import asyncio, gc, json, math, shutil, signal, threading, time

import pytest, torch

from minisgl_edu import LLM, SamplingParams
from minisgl_edu.checkpoint import save_random_model
from minisgl_edu.core import Match, RequestError
from plugins import DecodeFirst, Lazy, LoopAttention, PageChainCache

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SCRIPTS = ["The quick brown fox", "从前有一座山", "吾輩は猫である", "كان يا ما كان", "Все счастливые семьи", "एक समय की बात", "🎉🎉👩‍👩‍👧‍👦 party"]


@pytest.fixture(scope="module")
def llm():
    "The default model on the CPU, float32"
    with LLM(device="cpu", max_running_requests=16, max_seq_len=512) as llm: yield llm


@pytest.fixture(scope="module")
def tiny(tiny_model_dir):
    "A random model without a tokenizer, float64"
    with LLM(str(tiny_model_dir), device="cpu", dtype="float64", page_size=4, num_pages=64, max_running_requests=4) as llm: yield llm


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    "After every test all pages are free and nobody waits"
    yield
    for name in ("llm", "tiny"):
        if name in request.fixturenames: assert_idle(request.getfixturevalue(name))


def assert_idle(llm):
    gc.collect()
    llm.scheduler.check_integrity()
    stats = llm.scheduler.stats()
    assert not llm.scheduler.has_work and stats["pages_free"] + stats["pages_cached"] == llm.engine.num_pages and not llm._sessions.live, stats


def ids(n=4, **kw): return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, **kw)


def test_an_output_has_all_fields(llm):
    out, = llm.generate(["Once upon a time"], GREEDY)
    assert out.prompt_token_ids == llm.tokenizer("Once upon a time")["input_ids"] and out.cached_tokens == 0
    assert len(out.token_ids) == 24 and out.finish_reason == "length" and out.text == llm.tokenizer.decode(out.token_ids)


def test_chat_knows_paris(llm):
    out = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert "Paris" in out.text and out.finish_reason == "stop" and out.token_ids[-1] in llm.engine.eos_token_ids
    assert "<|im_end|>" not in out.text and out.text == llm.tokenizer.decode(out.token_ids[:-1])


def test_prompts_as_text_or_ids_one_or_many(llm):
    one = llm.generate("Once upon a time", GREEDY)
    tokens = one[0].prompt_token_ids
    assert len(one) == 1 and one == llm.generate(tokens, GREEDY) == llm.generate([tokens], GREEDY)
    assert [o.text for o in llm.generate(["Once upon a time", tokens], GREEDY)] == [one[0].text] * 2
    assert llm.generate([]) == []


def test_one_params_each(llm):
    outs = llm.generate(["a", "b", "c"], [ids(n) for n in (1, 2, 5)])
    assert [len(o.token_ids) for o in outs] == [1, 2, 5]   # met exactly, with limit 1 too
    with pytest.raises(ValueError, match="3 prompts but 2 params"): llm.generate(["a", "b", "c"], [ids(), ids()])


def test_more_prompts_than_rows(tiny):
    prompts = [[i + 3, i + 4, i + 5] for i in range(30)]
    together = tiny.generate(prompts, ids(6))
    assert [o.token_ids for o in together] == [tiny.generate(p, ids(6))[0].token_ids for p in prompts]


@pytest.mark.parametrize("prompt", SCRIPTS)
def test_increments_are_the_text(llm, prompt):
    whole = llm.generate(prompt, GREEDY)[0]
    pieces = list(llm.stream(prompt, GREEDY))
    assert "".join(pieces) == whole.text and all(pieces) and len(pieces) > 1
    full = llm.tokenizer.decode([t for t in whole.token_ids if t not in llm.engine.eos_token_ids])
    assert whole.text == full and ("\ufffd" in "".join(pieces)) <= ("\ufffd" in full)


def test_stream_takes_messages_and_keeps_its_output(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    stream = llm.stream(messages, GREEDY)
    assert "".join(stream) == llm.chat(messages, GREEDY).text == stream.output.text and stream.output.finish_reason == "stop"


def test_streams_and_calls_interleave(llm):
    alone = [llm.generate(p, GREEDY)[0].text for p in ("One, two,", "Red, green,")]
    a, b = llm.stream("One, two,", GREEDY), llm.stream("Red, green,", GREEDY)
    first = next(a), next(b)
    between = llm.generate("One, two,", GREEDY)[0].text
    assert [first[0] + "".join(a), first[1] + "".join(b)] == alone and between == alone[0]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=24)])
def test_a_stop_string_ends_the_text_before_it(llm, params):
    text = llm.generate("Once upon a time", params)[0].text
    stop = text[len(text) // 2:len(text) // 2 + 4]
    params = SamplingParams(**{**vars(params), "stop": [stop, "never there"]})
    out, = llm.generate("Once upon a time", params)
    assert out.text == text[:text.index(stop)] and out.finish_reason == "stop" and len(out.token_ids) < 24
    assert "".join(llm.stream("Once upon a time", params)) == out.text


def test_stop_string_in_the_last_allowed_token(llm):
    tokens = llm.generate("Once upon a time", GREEDY)[0].token_ids
    text = llm.tokenizer.decode(tokens[:6])
    out, = llm.generate("Once upon a time", ids(6, stop=text[-3:]))
    assert out.finish_reason == "stop" and out.text == text[:text.index(text[-3:])]


def test_defaults_are_16_tokens_or_the_room_left(tiny):
    assert len(tiny.generate([3, 4, 5])[0].token_ids) <= 16
    room = tiny.engine.max_seq_len
    out = tiny.generate([[3 + i % 90 for i in range(room - 5)]])[0]
    assert len(out.token_ids) == 5 or out.finish_reason == "stop"
    out = tiny.generate([3, 4], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))[0]
    assert len(out.token_ids) == room - 2
    long = [3 + i % 90 for i in range(room - 5)]
    out = tiny.generate([long], SamplingParams(temperature=0.0, ignore_eos=True))[0]  # nobody asked for 16
    assert len(out.token_ids) == 5
    with pytest.raises(RequestError, match="max_tokens is 16; .* room for 5"): tiny.generate([long], SamplingParams(temperature=0.0, max_tokens=16))


@pytest.mark.parametrize("prompt, params, words", [
    ("", GREEDY, ("empty",)), ([[]], GREEDY, ("empty",)), ([[49152]], GREEDY, ("49152",)), ([[-1]], GREEDY, ("-1",)),
    ([[1] * 600], GREEDY, ("600", "512")), ([[1] * 500], GREEDY, ("max_tokens", "24", "12")), ([[1] * 512], None, ("512",)),
    ([["a", 1]], GREEDY, ()), ([None], GREEDY, ("prompt",)), (3, GREEDY, ("prompt",)), ("a", "greedy", ("SamplingParams",)), ("a", {}, ("SamplingParams",))])
def test_bad_input_is_a_value_error_with_the_numbers(llm, prompt, params, words):
    with pytest.raises(ValueError) as e: llm.generate(prompt, params)
    assert all(w in str(e.value) for w in words), e.value
    assert len(llm.generate("a", ids(2))[0].token_ids) == 2


@pytest.mark.parametrize("messages", [[], [{"role": "king", "content": "Hi"}], [{"role": "user"}], [{"role": "user", "content": 3}], ["Hi"], "Hi", None])
def test_bad_messages(llm, messages):
    with pytest.raises(ValueError): llm.chat(messages, GREEDY)


def test_one_refused_prompt_leaves_nothing_of_the_others(llm):
    with pytest.raises(RequestError) as e: llm.generate(["fine", "fine too", [1] * 600], GREEDY)
    assert e.value.code == "context_length_exceeded"


@pytest.mark.parametrize("bad", [dict(temperature=-1), dict(temperature=math.nan), dict(top_p=0), dict(top_p=1.5), dict(max_tokens=0), dict(max_tokens=-1),
    dict(top_k=0), dict(min_p=2), dict(stop=""), dict(stop=[3]), dict(seed=1.5)])
def test_bad_params_name_their_field(bad):
    with pytest.raises(ValueError, match=next(iter(bad))): SamplingParams(**bad)


def test_unknown_keywords_and_tp_are_refused_by_name(tiny_model_dir):
    with pytest.raises(TypeError, match="unknown.*pagesize"): LLM(str(tiny_model_dir), pagesize=3)
    with pytest.raises(TypeError, match="tp"): LLM(str(tiny_model_dir), tp=2)
    with pytest.raises(ValueError, match="page_size"): LLM(str(tiny_model_dir), page_size=0)


def test_without_a_tokenizer_token_ids_work_and_the_rest_is_refused(tiny):
    out, = tiny.generate([5, 6, 7], ids(4))
    assert tiny.tokenizer is None and out.text == "" and len(out.token_ids) == 4 and list(tiny.stream([5, 6, 7], ids(4))) == []
    for call in (lambda: tiny.generate("text", ids()), lambda: tiny.chat([{"role": "user", "content": "Hi"}], ids()), lambda: tiny.generate([5], ids(stop="x"))):
        with pytest.raises(ValueError, match="no tokenizer|need a tokenizer"): call()


def test_a_stream_closed_early_frees_everything(llm):
    stream = llm.stream("Tell me a long story.", ids(400))
    next(stream)
    assert llm.scheduler.stats()["running"] == 1
    stream.close(); stream.close()
    assert_idle(llm)
    assert list(stream) == [] and stream.output.finish_reason == "abort"


def test_a_forgotten_stream_frees_everything(llm):
    for piece in llm.stream("Tell me a long story.", ids(400)): break
    never_started = llm.stream("Another one.", ids(400))
    del never_started, piece
    assert_idle(llm)


def test_a_stream_forgotten_during_a_call_frees_everything(llm, monkeypatch):
    stream, step = llm.stream("Tell me a long story.", ids(400)), llm.scheduler.step
    next(stream)
    held = [stream]; del stream
    def step_then_forget():
        events = step()
        if held: held.clear(); gc.collect()
        return events
    monkeypatch.setattr(llm.scheduler, "step", step_then_forget)
    assert len(llm.generate("Hi", ids(8))[0].token_ids) == 8
    assert_idle(llm)


def test_interrupt_aborts_the_call_and_leaves_the_engine_usable(llm):
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    before = llm.generate("Once upon a time", GREEDY)[0].text
    for delay in (0.05, 0.2, 0.5):
        timer = threading.Timer(delay, signal.raise_signal, [signal.SIGINT]); timer.start()
        with pytest.raises(KeyboardInterrupt): llm.generate(["Tell me a long story.", "And another."] * 4, ids(400))
        timer.join(); assert_idle(llm)
    assert llm.generate("Once upon a time", GREEDY)[0].text == before and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_ends_a_stream(llm):
    stream = llm.stream("Tell me a long story.", ids(400))
    next(stream)
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]); timer.start()
    with pytest.raises(KeyboardInterrupt): list(stream)
    timer.join()
    assert_idle(llm)
    assert stream.output.finish_reason == "abort"


def test_a_handler_that_does_not_raise_lets_the_call_go_on(llm):
    seen, before = [], signal.signal(signal.SIGINT, lambda *args: seen.append(args))
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    try:
        timer.start()
        assert len(llm.generate("Once upon a time", ids(40))[0].token_ids) == 40
    finally: timer.join(); signal.signal(signal.SIGINT, before)
    assert len(seen) == 1


def test_a_second_thread_is_refused_not_corrupted(llm):
    before, errors, started = llm.generate("Once upon a time", GREEDY)[0].text, [], threading.Event()
    def other():
        started.wait()
        for call in (lambda: llm.generate("Hi", ids(2)), lambda: llm.stream("Hi", ids(2)), llm.close):
            try: call()
            except RuntimeError as e: errors.append(str(e))
    thread = threading.Thread(target=other); thread.start()
    step = llm.scheduler.step
    def announce():
        started.set(); thread.join(); return step()
    llm.scheduler.step = announce
    try: assert llm.generate("Once upon a time", GREEDY)[0].text == before
    finally: del llm.scheduler.step
    assert len(errors) == 3 and all("one thread at a time" in e for e in errors)


def test_threads_one_after_another(llm):
    results, main = [], llm.generate("Once upon a time", GREEDY)[0].text
    for _ in range(2):
        t = threading.Thread(target=lambda: results.append(llm.generate("Once upon a time", GREEDY)[0].text)); t.start(); t.join()
    assert results == [main] * 2


def test_inside_a_running_event_loop(llm, recwarn):
    async def cell(): return llm.generate("Once upon a time", ids(4))[0].text, "".join(llm.stream("Once upon a time", ids(4)))
    a, b = asyncio.run(cell())
    assert a == b and not [w for w in recwarn if "never awaited" in str(w.message)]


def test_a_failing_forward_pass_is_the_callers_to_know(tiny, monkeypatch):
    good = tiny.generate([5, 6], ids(4))[0].token_ids
    def broken(ctx, args): raise ZeroDivisionError("the device is on fire")
    with monkeypatch.context() as m:
        m.setattr(tiny.engine, "forward_batch", broken)
        with pytest.raises(RuntimeError, match="on fire"): tiny.generate([[5, 6], [7, 8]], ids(4))
        with pytest.raises(RuntimeError, match="on fire"): list(tiny.stream([5, 6], ids(4)))
    assert tiny.generate([5, 6], ids(4))[0].token_ids == good


def test_the_whole_prompt_is_never_cached(tiny):
    runs = [tiny.generate([11, 12, 13, 14, 15, 16, 17, 18], ids(4))[0] for _ in range(2)]
    assert runs[0].token_ids == runs[1].token_ids and runs[1].cached_tokens < 8


def test_every_end_token_of_the_model_ends(tmp_path, tiny_config, tokenizer):
    "The union of tokenizer, config.json and generation_config.json; none of them with ignore_eos"
    path = save_random_model(tmp_path/"m", tiny_config)
    with LLM(str(path), device="cpu", dtype="float64", num_pages=16) as llm: out = llm.generate([5, 6, 7], ids(12))[0].token_ids
    places = {t: out.index(t) for t in dict.fromkeys(out)}
    assert len(places) >= 3, out
    for name, key in (("config.json", "eos_token_id"), ("generation_config.json", "eos_token_id")):
        token = list(places)[2 if name == "config.json" else 1]
        here = shutil.copytree(path, tmp_path/name)
        for file in ("config.json", "generation_config.json"):
            data = json.loads((here/file).read_text()); data[key] = [100, token] if file == name else 101
            (here/file).write_text(json.dumps(data))
        with LLM(str(here), device="cpu", dtype="float64", num_pages=16) as llm:
            assert set(llm.engine.eos_token_ids) >= {100, 101, token} if name == "config.json" else True
            got, = llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=12))
            assert got.token_ids == out[:places[token] + 1] and got.finish_reason == "stop"
            assert llm.generate([5, 6, 7], ids(12))[0].token_ids == out


def test_closed_means_closed(tiny_model_dir):
    llm = LLM(str(tiny_model_dir), device="cpu", num_pages=16)
    stream = llm.stream([5, 6], ids(100))
    threads = threading.active_count()
    llm.close(); llm.close()
    assert threading.active_count() == threads - 1 and list(stream) == []
    for call in (lambda: llm.generate([5], ids()), lambda: llm.stream([5], ids())):
        with pytest.raises(RuntimeError, match="closed"): call()


def test_seeds_do_not_depend_on_company(llm):
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=12)
    alone = llm.generate("Once upon a time", params)[0].token_ids
    crowd = llm.generate(["Hi", "Once upon a time", "Yes, and"], [SamplingParams(max_tokens=12), params, SamplingParams(max_tokens=12)])
    assert crowd[1].token_ids == alone


def test_logprobs_stand_beside_their_tokens(llm):
    asks, silent = llm.generate("Once upon a time", [SamplingParams(temperature=0, max_tokens=12, logprobs=3)])[0], llm.generate("Once upon a time", GREEDY)[0]
    assert silent.logprobs is None and asks.token_ids == silent.token_ids[:12] and len(asks.logprobs) == 12
    for token, told in zip(asks.token_ids, asks.logprobs):
        assert told.top[0] == (token, told.logprob) and len(told.top) == 3 and 0 >= told.top[0][1] >= told.top[1][1] >= told.top[2][1]
    drawn = llm.generate("Once upon a time", SamplingParams(seed=3, max_tokens=12, logprobs=0))[0]
    assert len(drawn.logprobs) == len(drawn.token_ids) and all(told.top == () and told.logprob < 0 for told in drawn.logprobs)
    stream = llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=12, logprobs=3))
    assert "".join(stream) == asks.text and stream.output.logprobs == asks.logprobs


def test_penalties_and_bias_change_the_text(llm):
    plain = llm.generate("I like cats. I like cats. I", ids(24))[0].token_ids
    moved = llm.generate("I like cats. I like cats. I", ids(24, frequency_penalty=1.0))[0].token_ids
    assert len(set(plain)) < 8 and len(set(moved)) > 16
    never = llm.generate("I like cats. I like cats. I", ids(24, logit_bias={t: -100 for t in set(plain)}))[0].token_ids
    assert not set(never) & set(plain)


def test_an_overlapped_engine_is_idle_after_a_call(tiny_model_dir):
    "The step launched in vain is through before the call returns"
    with LLM(str(tiny_model_dir), device="cpu", dtype="float64", page_size=4, num_pages=64, max_running_requests=4, disable_overlap=False) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        end = llm.generate([[5, 6, 7]], greedy)[0].token_ids[4]
        llm.scheduler._eos = frozenset([end])
        out = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=12))[0]
        assert out.finish_reason == "stop" and not llm.scheduler.has_work
        assert_idle(llm)


def test_arrays_are_prompts(tiny):
    import numpy as np
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    assert tiny.generate([np.array([5, 6]), torch.tensor([7, 8])], greedy) == tiny.generate([[5, 6], [7, 8]], greedy)


# ---- a reader's own parts

@pytest.mark.parametrize("own", [dict(attention_backend=LoopAttention), dict(cache=PageChainCache), dict(policy=DecodeFirst), dict(policy=DecodeFirst()),
    dict(attention_backend=LoopAttention, cache=PageChainCache, policy=Lazy)], ids=lambda own: "+".join(own))
def test_own_parts_by_keyword(tiny_model_dir, tiny, own):
    "Through `LLM`, with and without overlap: the same tokens, and what the cache keeps is found again"
    work = [([5, 6, 7, 8, 9, 10 + i], ids(3 + i)) for i in range(6)]
    plain = [o.token_ids for o in tiny.generate([p for p, _ in work], [params for _, params in work])]
    for overlap in (False, True):
        with LLM(str(tiny_model_dir), device="cpu", dtype="float64", page_size=4, num_pages=16, max_running_requests=4, disable_overlap=not overlap, **own) as llm:
            rounds = [llm.generate([p for p, _ in work], [params for _, params in work]) for _ in range(2)]
            assert [[o.token_ids for o in outs] for outs in rounds] == [plain, plain]
            assert all(o.cached_tokens == 4 for o in rounds[1])
            assert_idle(llm)


class Lacking:
    def __init__(self, *args): pass
    def match_prefix(self, token_ids): return Match([], 0, None)
class ForgetsToReturn(PageChainCache):
    def insert(self, token_ids, pages): super().insert(token_ids, pages)
class PlainTuple(PageChainCache):
    def match_prefix(self, token_ids): return [], 0, None
class OneWord:
    def order(self, view): return "decode"
class NoAnswer:
    def order(self, view): pass
class GivesNone(LoopAttention):
    def forward(self, *args): super().forward(*args)
class GivesFlat(LoopAttention):
    def forward(self, *args): return super().forward(*args).flatten(1)
class GivesSingle(LoopAttention):
    def forward(self, *args): return super().forward(*args).float()
class OneMore(PageChainCache):
    def match_prefix(self, token_ids):
        match = super().match_prefix(token_ids)
        return Match(match.pages, match.num_tokens + 1, match.handle)
class NoMaker: pass


@pytest.mark.parametrize("own, error, words", [
    (dict(cache=Lacking), TypeError, "cache: Lacking is no PrefixCache: it lacks lock, unlock, insert, evict, check_integrity, evictable_pages, protected_pages"),
    (dict(cache=ForgetsToReturn), TypeError, "ForgetsToReturn.insert must return a list, not None"),
    (dict(cache=PlainTuple), TypeError, "PlainTuple.match_prefix must return a Match"),
    (dict(cache=PageChainCache(8, 4)), ValueError, "cache cannot be an instance of PageChainCache; use one of .* or a class called as cache\\(num_pages, page_size\\)"),
    (dict(policy=OneWord), ValueError, "OneWord.order must return a tuple of 'prefill', 'decode', 'mixed', not 'decode'"),
    (dict(policy=NoAnswer()), ValueError, "NoAnswer.order must return a tuple .* not None"),
    (dict(policy=object()), ValueError, "policy cannot be an instance of object; use one of .* or an object \\(or a class of such\\) with a method order\\(view\\)"),
    (dict(attention_backend=Lacking), TypeError, "attention_backend: Lacking is no AttentionBackend: it lacks prepare, forward"),
    (dict(attention_backend=LoopAttention(None, None, None)), ValueError, "attention_backend cannot be an instance of LoopAttention; use one of .* or a class called as Backend\\(config, pool, page_table\\)"),
    (dict(attention_backend=GivesNone), RuntimeError, "GivesNone.forward must return shape \\(3, 4, 8\\), that of q, not None"),
    (dict(attention_backend=GivesFlat), RuntimeError, "GivesFlat.forward must return shape \\(3, 4, 8\\), that of q, not .*3, 32"),
    (dict(attention_backend=GivesSingle), RuntimeError, "GivesSingle.forward must return torch.float64, that of q, not torch.float32"),
    (dict(cache=OneMore), TypeError, "cache: OneMore.match_prefix says 1 of 2 tokens are in 0 pages of"),
    (dict(cache=NoMaker), TypeError, "cache: .*NoMaker.* must be callable as cache\\(num_pages, page_size\\)")])
def test_a_part_that_does_not_fit_is_refused_by_name(tiny_model_dir, own, error, words):
    with pytest.raises(error, match=words):
        with LLM(str(tiny_model_dir), device="cpu", dtype="float64", num_pages=16, **own) as llm: llm.generate([[5, 6, 7]], ids())


def test_one_that_fails_takes_no_other_output_along(tiny, monkeypatch):
    "Scores that are not numbers end their request alone; the error brings what the others gave"
    logits = tiny.engine.logits
    steps = []
    def spoilt(ctx):
        out = logits(ctx).clone()
        if not steps: out[1] = torch.nan  # the first step holds all three
        steps.append(len(out))
        return out
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    alone = tiny.generate([[5, 6, 7]], params)[0]
    monkeypatch.setattr(tiny.engine, "logits", spoilt)
    with pytest.raises(RuntimeError, match="request .* failed: .*NaN") as caught: tiny.generate([[5, 6, 7], [9, 9], [5, 6, 7, 8]], params)
    first, second, third = caught.value.outputs
    assert steps == [3, 2, 2, 2]
    assert first.token_ids == alone.token_ids and second is None and len(third.token_ids) == 4


def test_close_ends_the_engine_whatever_a_part_says(tiny_model_dir, monkeypatch):
    "A cache that lied may lie again when its requests are released"
    llm = LLM(str(tiny_model_dir), device="cpu", num_pages=16, page_size=4)
    def lies(_): raise TypeError("cache: it will not let go")
    monkeypatch.setattr(llm._sessions, "release", lies)
    with pytest.raises(TypeError, match="will not let go"): llm.close()
    assert llm.engine.closed
    llm.close()  # nothing more to do
