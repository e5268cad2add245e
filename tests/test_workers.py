"The three loops, in-process; and what a worker process owes its launcher"
import multiprocessing, os, signal, subprocess, sys, time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from minisgl_edu.core import RequestError, SamplingParams, TokenEvent, TokenLogprobs
from minisgl_edu.messages import (AbortMsg, Channel, ErrorInfo, FailMsg, ReadyMsg, ReplyMsg, ShutdownMsg, StatsMsg, StopMsg, SubmitMsg,
    TokenizeMsg, TokenMsg, TokenText, WatchMsg)
from minisgl_edu.text import TextStream, decode, encode
from minisgl_edu.workers import DetokenizerLoop, SchedulerLoop, TokenizerLoop, WorkerArgs, tokenizer_worker

P = SamplingParams(temperature=0.0, max_tokens=8)


# --- tokenizer ---

def test_prompts_of_all_three_kinds_become_ids(tokenizer):
    loop = TokenizerLoop(lambda p: encode(tokenizer, p))
    chat = [{"role": "user", "content": "Hi"}]
    forward, refused = loop.handle([TokenizeMsg(1, "Once upon a time", P), TokenizeMsg(2, chat, P), TokenizeMsg(3, [5, 6], P)])
    assert refused == [] and [m.uid for m in forward] == [1, 2, 3] and forward[2] == SubmitMsg(3, [5, 6], P)
    assert forward[0].input_ids == tokenizer("Once upon a time")["input_ids"]
    assert "assistant" in tokenizer.decode(forward[1].input_ids)


def test_a_refused_prompt_is_its_own_errors_only_and_aborts_keep_their_place(tokenizer):
    loop = TokenizerLoop(lambda p: encode(tokenizer, p))
    bad = [{"role": "wizard", "content": "Hi"}]
    forward, refused = loop.handle([TokenizeMsg(1, "a", P), AbortMsg(1), TokenizeMsg(2, bad, P), TokenizeMsg(3, "b", P), AbortMsg(2)])
    assert [(type(m), m.uid) for m in forward] == [(SubmitMsg, 1), (AbortMsg, 1), (SubmitMsg, 3), (AbortMsg, 2)]
    reply, = refused
    assert (reply.uid, reply.finish_reason, reply.error.param) == (2, "error", "messages") and "wizard" in reply.error.message


def test_a_tokenizer_that_breaks_fails_one_request():
    def encode(prompt):
        if prompt == "bad": raise KeyError("boom")
        return [1]
    forward, refused = TokenizerLoop(encode).handle([TokenizeMsg(1, "bad", P), TokenizeMsg(2, "good", P)])
    assert [m.uid for m in forward] == [2] and refused[0].error.code == "internal_error" and "boom" in refused[0].error.message


# --- detokenizer ---

@pytest.fixture
def detok(tokenizer): return DetokenizerLoop(lambda p: TextStream(tokenizer, p.stop, p.skip_special_tokens, (tokenizer.eos_token_id,)))


def tokens_of(tokenizer, uid, text, params=P, finish="length", extra=()):
    ids = [*tokenizer.encode(text), *extra]
    return ids, [TokenMsg(uid, t, finish if i == len(ids) - 1 else None, params if i == 0 else None, 3, 1) for i, t in enumerate(ids)]


def run(loop, batches):
    replies, stops = [], []
    for batch in batches:
        r, s = loop.handle(batch)
        assert len({m.uid for m in r}) == len(r), "at most one reply per uid and round"
        replies += r; stops += s
    return replies, stops


@pytest.mark.parametrize("text", ["The quick brown fox", "从前有一座山 🎉🎉!", "a\n\nb\r\n"])
@pytest.mark.parametrize("together", [1, 3, 100])
def test_replies_add_up_and_end_once(detok, tokenizer, text, together):
    ids, msgs = tokens_of(tokenizer, 4, text)
    replies, stops = run(detok, [msgs[i:i + together] for i in range(0, len(msgs), together)])
    assert "".join(r.text for r in replies) == text == decode(tokenizer, ids) and stops == []
    assert sum((r.token_ids for r in replies), []) == ids
    assert [r.finish_reason for r in replies[:-1]] == [None] * (len(replies) - 1)
    last = replies[-1]
    assert (last.finish_reason, last.prompt_tokens, last.completion_tokens, last.cached_tokens) == ("length", 3, len(ids), 1)
    assert detok.streams == {}


def test_a_reply_that_shows_nothing_is_not_sent(detok, tokenizer):
    ids, msgs = tokens_of(tokenizer, 1, "🦩🦩")  # rare: several byte tokens each
    assert len(ids) > 4
    replies, _ = run(detok, [[m] for m in msgs])
    assert all(r.text or r.finish_reason for r in replies) and "\ufffd" not in "".join(r.text for r in replies)


def test_a_stop_string_ends_the_request_and_late_tokens_are_dropped(detok, tokenizer):
    ids, msgs = tokens_of(tokenizer, 1, "one two three four five", SamplingParams(stop=["three"]))
    replies, stops = run(detok, [[m] for m in msgs])
    assert "".join(r.text for r in replies) == "one two " and stops == [StopMsg(1)]
    assert [r.finish_reason for r in replies if r.finish_reason] == ["stop"]
    assert replies[-1].completion_tokens < len(ids) and detok.streams == {}
    assert run(detok, [[TokenMsg(1, None, "abort")]]) == ([], []), "an abort that crossed the stop adds no second end"


def test_a_stop_string_in_the_last_token_needs_no_stop_message(detok, tokenizer):
    _, msgs = tokens_of(tokenizer, 1, "one two three", SamplingParams(stop=["three"]))
    replies, stops = run(detok, [msgs])
    assert (replies[0].text, replies[0].finish_reason, stops) == ("one two ", "stop", [])


def test_end_token_is_not_text(detok, tokenizer):
    ids, msgs = tokens_of(tokenizer, 1, "Paris.", finish="stop", extra=[tokenizer.eos_token_id])
    (reply,), _ = run(detok, [msgs])
    assert (reply.text, reply.finish_reason, reply.completion_tokens) == ("Paris.", "stop", len(ids))


def test_ends_without_a_token(detok, tokenizer):
    _, msgs = tokens_of(tokenizer, 1, "ab cd", SamplingParams(stop=["cdx"]), finish=None)
    replies, _ = run(detok, [msgs, [TokenMsg(1, None, "abort", None, 3)]])
    assert "".join(r.text for r in replies) == "ab cd" and replies[-1].finish_reason == "abort"
    error = ErrorInfo("too long", "prompt", "context_length_exceeded")
    (reply,), stops = run(detok, [[TokenMsg(2, None, "error", P, 5, 0, error)]])
    assert (reply.error, reply.finish_reason, reply.text, stops) == (error, "error", "", []) and detok.streams == {}


def test_text_that_breaks_fails_one_request(tokenizer):
    class Broken:
        def push(self, *a): raise IndexError("boom")
    loop = DetokenizerLoop(lambda p: Broken() if p.seed == 9 else TextStream(tokenizer))
    replies, stops = run(loop, [[TokenMsg(1, 5, None, SamplingParams(seed=9)), TokenMsg(2, 260, None, P)], [TokenMsg(1, 5), TokenMsg(2, 261, "length")]])
    assert stops == [StopMsg(1)] and loop.streams == {}
    assert [(r.uid, r.finish_reason) for r in replies if r.finish_reason] == [(1, "error"), (2, "length")]


def test_many_interleaved_streams_keep_apart(detok, tokenizer):
    texts = {u: f"request {u} counts {' '.join(map(str, range(u, u + 9)))} 🎉" for u in range(8)}
    queues = {u: tokens_of(tokenizer, u, t)[1] for u, t in texts.items()}
    batches = [[q[i] for q in queues.values() if i < len(q)] for i in range(max(map(len, queues.values())))]
    replies, _ = run(detok, batches)
    for u, t in texts.items(): assert "".join(r.text for r in replies if r.uid == u) == t


def test_logprobs_are_spelled_and_stay_with_their_tokens(detok, tokenizer):
    "Also where a token shows no text yet, or its text is held back, or a stop string cuts it off"
    params = SamplingParams(logprobs=2, stop=["stop here"])
    ids, msgs = tokens_of(tokenizer, 1, "naïve 🦩 then stop here", params)
    space = tokenizer.encode(" then")[0]
    msgs = [replace(m, logprobs=TokenLogprobs(-float(i), ((m.token_id, -float(i)), (space, -9.0)))) for i, m in enumerate(msgs)]
    for batches in ([[m] for m in msgs], [msgs]):
        replies, _ = run(detok, batches)
        for r in replies: assert len(r.logprobs or ()) == len(r.token_ids)
        told = [t for r in replies for t in r.logprobs or ()]
        assert [t.logprob for t in told] == [-float(i) for i in range(len(told))] and len(told) == replies[-1].completion_tokens
        whole = b"".join(bytes(t.bytes) for t in told).decode()
        assert whole == "naïve 🦩 then stop here" and "".join(r.text for r in replies) == "naïve 🦩 then "
        assert all(t.top[0] == replace(t, top=(), start=0) and t.top[1] == TokenText(" then", tuple(b" then"), -9.0) for t in told)
        assert any("\ufffd" in t.token for t in told), "half an emoji has no text"
        assert all("naïve 🦩 then stop here"[t.start:].startswith(t.token) for t in told if "\ufffd" not in t.token), "also where the text is held back, or cut off"
    replies, _ = run(detok, [[m] for m in tokens_of(tokenizer, 2, "no numbers")[1]])
    assert all(r.logprobs is None for r in replies)


# --- scheduler ---

class FakeScheduler:
    "Gives one token per step and request until `max_tokens`"
    def __init__(self): self.left, self.aborted, self.log, self.rounds = {}, [], [], 0
    @property
    def has_work(self): return bool(self.left or self.aborted)
    def add(self, uid, ids, params):
        if not ids: raise RequestError("prompt is empty", "prompt")
        self.left[uid] = params.max_tokens
    def abort(self, uid):
        if self.left.pop(uid, None): self.aborted.append(uid)
    def stop(self, uid): self.left.pop(uid, None); self.log.append(("stop", uid))
    def step(self):
        self.rounds += 1
        out = [TokenEvent(u, None, "abort", 2) for u in self.aborted]
        self.aborted = []
        for u in list(self.left):
            self.left[u] -= 1
            out.append(TokenEvent(u, 7, None if self.left[u] else "length", 2))
            if not self.left[u]: del self.left[u]
        return out
    def stats(self): return {"running": len(self.left), "rounds": self.rounds}


def test_params_travel_with_the_first_message_only():
    loop = SchedulerLoop(FakeScheduler())
    assert loop.handle([SubmitMsg(1, [1, 2], SamplingParams(max_tokens=2)), SubmitMsg(2, [1, 2], P)]) == [] and loop.has_work
    first, second = loop.step(), loop.step()
    assert [m.params for m in first] == [SamplingParams(max_tokens=2), P] and [m.params for m in second] == [None, None]
    assert [m.finish_reason for m in second] == ["length", None]


def test_a_refusal_ends_its_request_with_params_so_that_it_is_not_taken_for_late():
    loop = SchedulerLoop(FakeScheduler())
    msg, = loop.handle([SubmitMsg(1, [], P), SubmitMsg(2, [1], P)])
    assert (msg.uid, msg.finish_reason, msg.params, msg.error.param) == (1, "error", P, "prompt")
    assert [m.uid for m in loop.step()] == [2]


def test_abort_before_the_first_token_and_stop():
    loop = SchedulerLoop(FakeScheduler())
    loop.handle([SubmitMsg(1, [1], P), AbortMsg(1), SubmitMsg(2, [1], P)])
    events = loop.step()
    assert [(m.uid, m.finish_reason, m.params) for m in events] == [(1, "abort", P), (2, None, P)]
    loop.handle([StopMsg(2), AbortMsg(2), AbortMsg(99)])
    assert loop.scheduler.log == [("stop", 2)] and not loop.has_work and loop.step() == [] and loop.params == {}


def test_stats_come_now_and_then_and_once_when_it_falls_idle():
    loop = SchedulerLoop(FakeScheduler())
    assert loop.new_stats(0.0) == [StatsMsg({"running": 0, "rounds": 0})] and loop.new_stats(9.0) == []
    loop.handle([SubmitMsg(1, [1], SamplingParams(max_tokens=3))])
    sent = [len(loop.step()) and loop.new_stats(t) for t in (10.0, 10.1)]
    assert [len(s) for s in sent] == [1, 0]
    loop.step()
    assert loop.new_stats(10.11) == [StatsMsg({"running": 0, "rounds": 3})] and loop.new_stats(99.0) == []


def test_the_real_scheduler_behind_the_loop(tiny_model_dir):
    "Limits exact, refusals at once, abort and stop free everything, and the tokens are those of a run alone"
    from minisgl_edu.engine import Engine, EngineConfig
    from minisgl_edu.scheduler import Scheduler
    engine = Engine(EngineConfig(model=str(tiny_model_dir), device="cpu", dtype="float64", page_size=4, num_pages=16, max_running_requests=4))
    try:
        loop = SchedulerLoop(Scheduler(engine))
        def finish(msgs):
            out = loop.handle(msgs)
            while loop.has_work: out += loop.step()
            return out
        def limit(n): return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
        alone = finish([SubmitMsg(0, [5, 6, 7], limit(5))])
        assert [m.finish_reason for m in alone] == [None] * 4 + ["length"]
        mixed = finish([SubmitMsg(1, [5, 6, 7], limit(5)), SubmitMsg(2, [9], limit(1)), SubmitMsg(3, list(range(3, 103)), limit(5)), SubmitMsg(4, [8], limit(2))])
        assert [m.token_id for m in mixed if m.uid == 1] == [m.token_id for m in alone]
        assert [m.finish_reason for m in mixed if m.uid == 2] == ["length"] and len([m for m in mixed if m.uid == 4]) == 2
        refused, = [m for m in mixed if m.uid == 3]
        assert refused.finish_reason == "error" and mixed[0] is refused and "64" in refused.error.message  # the pool's 64 tokens
        loop.handle([SubmitMsg(5, [5, 6], limit(30)), SubmitMsg(6, [5, 6], limit(30))])
        first = loop.step()
        rest = finish([StopMsg(5), AbortMsg(6)])
        assert {m.uid for m in first} == {5, 6} and [(m.uid, m.finish_reason) for m in rest if m.finish_reason] == [(6, "abort")]
        assert not [m for m in rest if m.uid == 5], "a stopped request says no more"
        assert loop.scheduler.stats()["pages_used"] == 0
        told = finish([SubmitMsg(7, [5, 6, 7], replace(limit(5), logprobs=2)), SubmitMsg(8, [5], replace(limit(2), logit_bias={128: 1}))])
        assert [len(m.logprobs.top) for m in told if m.uid == 7] == [2] * 5 and [m.token_id for m in told if m.uid == 7] == [m.token_id for m in alone]
        assert all(m.logprobs.top[0] == (m.token_id, m.logprobs.logprob) for m in told if m.uid == 7) and told[0].error.param == "logit_bias"
        loop.scheduler.check_integrity()
    finally: engine.close()


# --- processes ---

SPAWN = multiprocessing.get_context("spawn")


def start_tokenizer(model_dir):
    ours, theirs = SPAWN.Pipe()
    inbox, to_scheduler, to_frontend = Channel(), Channel(), Channel()
    args = WorkerArgs("tokenizer-0", str(model_dir), inbox, to_scheduler, Channel(), to_frontend, theirs)
    process = SPAWN.Process(target=tokenizer_worker, args=(args,), daemon=True)
    process.start(); theirs.close()
    return SimpleNamespace(process=process, control=ours, inbox=inbox, to_scheduler=to_scheduler, to_frontend=to_frontend, args=args)


def test_a_worker_says_ready_works_and_ends_when_told(model_dir, tokenizer):
    w = start_tokenizer(model_dir)
    assert w.control.poll(60)
    ready = w.control.recv()
    assert isinstance(ready, ReadyMsg) and ready.pid == w.process.pid
    for s in (signal.SIGINT, signal.SIGTERM): os.kill(w.process.pid, s)  # the launcher's business, not its own
    w.inbox.send([TokenizeMsg(1, "Hello there", P), TokenizeMsg(2, "\ud800", P)])
    assert w.to_scheduler.recv(timeout=20) == [SubmitMsg(1, tokenizer.encode("Hello there"), P)]
    assert [r.error.param for r in w.to_frontend.recv(timeout=20)] == ["prompt"]
    w.control.send(ShutdownMsg())
    w.process.join(10)
    assert w.process.exitcode == 0


def test_a_worker_that_cannot_start_says_why(tiny_model_dir):
    w = start_tokenizer(tiny_model_dir)  # has no tokenizer files
    assert w.control.poll(60)
    fail = w.control.recv()
    w.process.join(10)
    assert isinstance(fail, FailMsg) and "no tokenizer files" in fail.reason and w.process.exitcode == 1


ORPHANS = """
import os, sys
sys.path[:0] = {paths!r}
from test_workers import start_tokenizer
if __name__ == "__main__":
    w = start_tokenizer({model!r})
    w.control.recv()
    print(w.process.pid, flush=True)
    sys.stdin.read()
"""


def test_a_worker_ends_when_its_launcher_is_killed(model_dir, tmp_path):
    script = tmp_path/"launcher.py"
    script.write_text(ORPHANS.format(paths=sys.path, model=str(model_dir)))
    launcher = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = int(launcher.stdout.readline())
    launcher.kill(); launcher.wait()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline: time.sleep(0.05)
    launcher.stdin.close(); launcher.stdout.close()
    assert not os.path.exists(f"/proc/{pid}")


def test_the_page_map_is_made_only_while_somebody_looks():
    forward, _ = TokenizerLoop(None).handle([WatchMsg()])
    loop = SchedulerLoop(FakeScheduler())
    loop.scheduler.cache, loop.scheduler.holders = SimpleNamespace(page_map=lambda reqs: "..u"), lambda: []
    now = time.monotonic()
    assert "pages" not in loop.new_stats(now)[0].stats
    assert loop.handle(forward) == [] and loop.new_stats(now)[0].stats["pages"] == "..u"
    assert "pages" not in loop.new_stats(now + 60)[0].stats


def test_the_answers_to_one_prompt_cost_one_reading():
    "Also when it is refused: then each of them hears why"
    read = []
    def encode(prompt):
        read.append(prompt)
        if prompt == "bad": raise RequestError("too long", "prompt")
        return [len(read)]
    loop, others = TokenizerLoop(encode), tuple(SamplingParams(seed=k) for k in range(4))
    forward, refused = loop.handle([TokenizeMsg(10, "good", P, others), AbortMsg(12)])
    assert forward == [SubmitMsg(10 + k, [1], p) for k, p in enumerate((P, *others))] + [AbortMsg(12)] and not refused and read == ["good"]
    forward, refused = loop.handle([TokenizeMsg(20, "bad", P, others)])
    assert not forward and [(m.uid, m.error.message) for m in refused] == [(20 + k, "too long") for k in range(5)] and read == ["good", "bad"]


def test_an_end_token_has_no_log_probability(detok, tokenizer):
    "It is no text; a last token that is text has one"
    params = SamplingParams(logprobs=0)
    for finish, extra, shown in (("stop", [tokenizer.eos_token_id], 2), ("length", [], 2)):
        ids, msgs = tokens_of(tokenizer, 1, "Paris.", params, finish, extra)
        replies, _ = run(detok, [[replace(m, logprobs=TokenLogprobs(-1.0, ()))] for m in msgs])
        told = [t for r in replies for t in r.logprobs or ()]
        assert "".join(t.token for t in told) == "Paris." and len(told) == shown and replies[-1].completion_tokens == len(ids)
