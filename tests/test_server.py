"The HTTP app over a toy engine: shapes, refusals, disconnects, failures"
import asyncio, json

import httpx
import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from minisgl_edu.core import RequestError, SamplingParams
from minisgl_edu.messages import AbortMsg, ErrorInfo, ReplyMsg, StatsMsg, TokenizeMsg, TokenText, WatchMsg
from minisgl_edu.server import Body, ChatBody, FrontendManager, PromptBody, ServerInfo, Session, create_app, prompts_of, sampling_params


class Engine:
    "Answers with the given replies; records what it was sent"
    def __init__(self, replies=("Hel", "lo"), finish="stop", error=None, info=(), **limits):
        self.sent, self.replies, self.finish, self.error = [], replies, finish, error
        self.frontend, self.info = FrontendManager([self], None, **limits), dict(info)
        async def no_listening(): self.frontend._loop = asyncio.get_running_loop()
        self.frontend.start = no_listening

    def send(self, msgs):
        self.sent += msgs
        for m in msgs:
            for k in range(1 + len(m.more)) if isinstance(m, TokenizeMsg) else (): asyncio.get_running_loop().create_task(self.serve(m.uid + k))

    async def serve(self, uid):
        await asyncio.sleep(0)
        if self.error: return self.frontend.deliver([ReplyMsg(uid, finish_reason="error", error=self.error)])
        for i, text in enumerate(self.replies, 1):
            end = self.finish if i == len(self.replies) else None
            self.frontend.deliver([ReplyMsg(uid, text, [i], end, prompt_tokens=5, completion_tokens=i, cached_tokens=2)])
            await asyncio.sleep(0)

    @property
    def asked(self): return [p for m in self.sent if isinstance(m, TokenizeMsg) for p in (m.params, *m.more)]

    def client(self):
        app = create_app(self.frontend, ServerInfo("toy", 64, **self.info))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=True), base_url="http://toy")

    def get(self, path, **kw):
        async def go():
            async with self.client() as c: return await c.get(path, **kw)
        return asyncio.run(go())

    def post(self, path, raw=None, **body):
        async def go():
            async with self.client() as c:
                return await (c.post(path, content=raw, headers={"content-type": "application/json"}) if raw is not None else c.post(path, json=body))
        return asyncio.run(go())


CHAT, TEXT, GEN = "/v1/chat/completions", "/v1/completions", "/generate"
HI = [{"role": "user", "content": "Hi"}]


def events_of(response):
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(b.startswith("data: ") for b in blocks)
    return [b[6:] if b[6:] == "[DONE]" else json.loads(b[6:]) for b in blocks]


@pytest.mark.parametrize("stream", [None, False])
def test_one_json_answer_by_default(stream):
    r = Engine().post(CHAT, messages=HI, **({} if stream is None else {"stream": stream}))
    assert r.status_code == 200 and r.headers["content-type"] == "application/json"
    doc = r.json()
    assert doc["object"] == "chat.completion" and doc["model"] == "toy" and doc["id"].startswith("chatcmpl-")
    assert doc["choices"] == [{"index": 0, "message": {"role": "assistant", "content": "Hello", "refusal": None}, "logprobs": None, "finish_reason": "stop"}]
    assert doc["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}


def test_chat_stream_has_the_openai_shape():
    r = Engine(finish="length").post(CHAT, messages=HI, stream=True)
    assert r.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events_of(r)
    assert done == "[DONE]"
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {(chunks[0]["id"], chunks[0]["created"], "toy", "chat.completion.chunk")}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:])
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == "Hello"
    assert all("usage" not in c for c in chunks)


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_is_one_extra_chunk_only_when_asked_for(path, options):
    body = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    *chunks, _ = events_of(Engine().post(path, stream=True, stream_options=options, **body))
    counted = [c for c in chunks if c.get("usage")]
    if not options.get("include_usage"): assert not counted
    else:
        assert counted == [chunks[-1]] and chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == Engine().post(path, **body).json()["usage"]


@pytest.mark.parametrize("text", ["a\n\nb", "line\r\nline\r\n", "data: [DONE]\n\n", "\u2028 ☃ 👩‍👩‍👧"])
def test_any_text_survives_the_event_stream(text):
    for path, body, get in ((GEN, {"prompt": "x"}, lambda c: c["text"]), (CHAT, {"messages": HI}, lambda c: c["choices"][0]["delta"].get("content") or "")):
        *chunks, _ = events_of(Engine([text]).post(path, stream=True, **body))
        assert "".join(map(get, chunks)) == text


BAD = [
    ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"temperature": True}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.5}, "top_p"), ({"top_k": 0}, "top_k"), ({"min_p": 2}, "min_p"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"), ({"stop": ""}, "stop"), ({"stop": [1]}, "stop"), ({"seed": "x"}, "seed"), ({"n": 0}, "n"), ({"n": 1000}, "n"),
    ({"n": True}, "n"), ({"logprobs": "x"}, "logprobs"), ({"frequency_penalty": 2.1}, "frequency_penalty"), ({"presence_penalty": -2.5}, "presence_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"-1": 1}}, "logit_bias"), ({"logit_bias": {"5": 101}}, "logit_bias"), ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"), ({"top_logprobs": 2}, "top_logprobs"), ({"tools": [{}]}, "tools"), ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"stream": "yes"}, "stream"), ({"stream_options": {"include_usage": True}}, "stream_options"), ({"nonsense": 1}, "nonsense"), ({"ignore_eos": 1}, "ignore_eos"),
]


@pytest.mark.parametrize("fields, param", BAD, ids=lambda x: str(x)[:40])
@pytest.mark.parametrize("path", [CHAT, TEXT, GEN])
def test_a_bad_field_is_refused_by_name_and_never_reaches_the_engine(path, fields, param):
    engine = Engine()
    r = engine.post(path, **({"messages": HI} if path == CHAT else {"prompt": "Hi"}), **fields)
    error = r.json()["error"]
    assert r.status_code == 400 and error["type"] == "invalid_request_error" and error["message"]
    assert error["param"] == param and param in error["message"]
    assert engine.sent == []
    assert engine.post(path, **({"messages": HI} if path == CHAT else {"prompt": "Hi"})).status_code == 200


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"messages": ', b"\xff\xfe", b'{"messages": [], "temperature": NaN}',
                                 b'{"messages": [{"role":"user","content":"x"}], "temperature": NaN}', b'{"messages": [{"role":"user","content":"x"}], "top_p": Infinity}',
                                 b'{"messages": [{"role":"user","content":"x"}], "temperature": -Infinity}', b"[" * 100000])
def test_malformed_bodies(raw):
    r = Engine().post(CHAT, raw=raw)
    assert r.status_code == 400 and r.json()["error"]["message"]


@pytest.mark.parametrize("messages", [[], "hi", [{"content": "x"}], [{"role": 3, "content": "x"}], [{"role": "user", "content": 5}], ["x"],
                                      [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], [{"role": "assistant", "content": "x", "tool_calls": [{}]}]])
def test_bad_messages(messages):
    r = Engine().post(CHAT, messages=messages)
    assert r.status_code == 400 and r.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("prompt", [[], "", ["a", ""], [[1], []], [1, "a"], ["a", 1], [[1], "a"], [["a"]], [True], [1.5], [None], ["a"] * 200, 7, None, {"a": 1}])
def test_bad_prompts(prompt):
    r = Engine().post(TEXT, prompt=prompt)
    assert r.status_code == 400 and r.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("fields, param, said", [
    ({"prompt": ["a", 1]}, "prompt", "prompt must be a text, a list of texts, a list of token ids, or a list of such lists"), ({"stop": 5}, "stop", "stop must be a text or a list of texts"),
    ({"stop": ["a", None]}, "stop", "stop must be a text or a list of texts"), ({"prompt": ...}, "prompt", "prompt: Field required"), ({"stream_options": 5}, "stream_options", "stream_options: must be a JSON object"),
    ({"stream": True, "stream_options": {"a": 1}}, "stream_options", "unknown field 'stream_options.a'"), ({"stream_options": {"include_usage": "x"}}, "stream_options", "stream_options.include_usage: "),
    ({"logit_bias": [1]}, "logit_bias", "logit_bias: must be a JSON object"), ({"logit_bias": {"5": "x"}}, "logit_bias", "logit_bias must be a number, got 'x'"), ({"logit_bias": {"5": True}}, "logit_bias", "logit_bias must be a number")])
def test_a_field_of_several_types_is_called_by_its_own_name(fields, param, said):
    "Not by the name that the validator gives to one of them, as in prompt.list[str]"
    error = Engine().post(TEXT, **{k: v for k, v in ({"prompt": "x"} | fields).items() if v is not ...}).json()["error"]
    assert error["param"] == param and error["message"].startswith(said)


@pytest.mark.parametrize("messages, said", [(["x"], "messages[0]: must be a JSON object"), ([*HI, {"role": "user", "content": 5}], "messages[1].content must be a string or a list of text parts, got 5"),
    ([{"role": "user"}], "messages[0].content must be a string or a list"), ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text must be a string")])
def test_a_bad_message_is_pointed_at(messages, said):
    error = Engine().post(CHAT, messages=messages).json()["error"]
    assert error["param"] == "messages" and error["message"].startswith(said)


@pytest.mark.parametrize("kind, fields", [(PromptBody, {"prompt": [1] * 1000 + ["a"]}), (PromptBody, {"prompt": ["a"] * 1000 + [1]}), (PromptBody, {"prompt": [["a"]] * 1000}), (PromptBody, {"prompt": [[1]] * 1000 + [["a"] * 1000]}),
    (PromptBody, {"prompt": ["a"] * 100 + [1]}), (PromptBody, {"prompt": [["a"]] * 100}), (PromptBody, {"prompt": [[1]] * 100 + [["a"] * 1000]}),
    (ChatBody, {"messages": [5] * 1000}), (Body, {"stop": [5] * 1000}), (Body, {"logit_bias": {str(i): "x" for i in range(1000)}}), (Body, {"stream_options": {str(i): 1 for i in range(1000)}})],
    ids=lambda x: list(x)[-1] if isinstance(x, dict) else x.__name__)
def test_a_thousand_faults_are_not_collected(kind, fields):
    "Else a body of a million would keep this process, and with it all clients, busy for half a minute"
    try: sampling_params(kind(**fields), None)
    except RequestError: pass  # ours, at the first fault
    except ValidationError as e: assert len(e.errors()) <= 4  # one for each type that would do
    else: pytest.fail("accepted")


@pytest.mark.parametrize("path", [TEXT, GEN])
@pytest.mark.parametrize("item", ["a", [1], [], ["a"]], ids=str)
def test_too_many_prompts_are_counted_and_not_looked_at(path, item):
    with pytest.raises(ValidationError, match="300000 prompts"): PromptBody(prompt=[item] * 300_000)  # also where the first item is wrong
    engine = Engine()
    r = engine.post(path, prompt=[item] * 129)
    assert (r.status_code, r.json()["error"]["param"], r.json()["error"]["message"]) == (400, "prompt", "129 prompts ask for as many choices; one request may have 128")
    assert not engine.sent


def test_other_http_errors_have_the_same_shape():
    assert Engine().post(TEXT, prompt="x", model="gpt-9").json()["error"]["code"] == "model_not_found"
    async def go(method, path):
        async with Engine().client() as c: return await c.request(method, path)
    for method, path, status in (("GET", "/nowhere", 404), ("GET", CHAT, 405)):
        r = asyncio.run(go(method, path))
        assert r.status_code == status and "message" in r.json()["error"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_refusal_from_the_scheduler_is_a_400_also_when_streaming(stream):
    engine = Engine(error=ErrorInfo("65 tokens are more than the context of 64", "prompt", "context_length_exceeded"))
    r = engine.post(CHAT, messages=HI, stream=stream)
    assert r.status_code == 400 and r.json()["error"]["code"] == "context_length_exceeded" and r.json()["error"]["type"] == "invalid_request_error"
    assert not engine.frontend.sessions and not any(isinstance(m, AbortMsg) for m in engine.sent)


def test_our_own_fault_is_a_500():
    r = Engine(error=ErrorInfo("the forward pass failed")).post(CHAT, messages=HI)
    assert r.status_code == 500 and r.json()["error"]["type"] == "server_error"


def test_a_normal_end_sends_no_abort():
    for stream in (True, False):
        engine = Engine()
        engine.post(GEN, prompt="x", stream=stream)
        assert [type(m) for m in engine.sent] == [TokenizeMsg] and not engine.frontend.sessions


def asgi(app, body, path, on_event, hang_up):
    "Call the app with a connection whose client hangs up when told"
    asked = []
    async def receive():
        if not asked: asked.append(1); return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await hang_up.wait()
        return {"type": "http.disconnect"}
    async def send(message): on_event(message)
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": [(b"content-type", b"application/json")], "scheme": "http", "server": ("toy", 80), "root_path": ""}
    return app(scope, receive, send)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("pieces_first", [0, 3])
def test_a_client_that_leaves_ends_its_request_once(stream, pieces_first):
    async def go():
        engine = Engine()
        engine.serve = lambda uid: asyncio.sleep(0)
        app, hang_up = create_app(engine.frontend, ServerInfo("toy")), asyncio.Event()
        call = asyncio.create_task(asgi(app, {"prompt": "x", "stream": stream}, GEN, lambda m: None, hang_up))
        for _ in range(pieces_first):
            await asyncio.sleep(0.01)
            engine.frontend.deliver([ReplyMsg(0, "x", [1])])
        await asyncio.sleep(0.02)
        hang_up.set()
        await asyncio.wait_for(call, 5)
        assert [type(m) for m in engine.sent] == [TokenizeMsg, AbortMsg] and not engine.frontend.sessions
        engine.frontend.deliver([ReplyMsg(0, "late", [1]), ReplyMsg(0, finish_reason="abort")])  # late news of a client that left
    asyncio.run(go())


def test_a_dead_worker_ends_streams_without_done_and_turns_later_requests_away():
    async def go():
        engine, events = Engine(), []
        engine.serve = lambda uid: asyncio.sleep(0)
        await engine.frontend.start()
        app = create_app(engine.frontend, ServerInfo("toy"))
        call = asyncio.create_task(asgi(app, {"prompt": "x", "stream": True}, GEN, lambda m: events.append(m.get("body", b"")), asyncio.Event()))
        await asyncio.sleep(0.02)
        engine.frontend.deliver([ReplyMsg(0, "x", [1])])
        await asyncio.to_thread(engine.frontend.fail, "the scheduler died")
        await asyncio.wait_for(call, 5)
        text = b"".join(events).decode()
        assert "the scheduler died" in text and "[DONE]" not in text
        async with engine.client() as c:
            assert (await c.post(GEN, json={"prompt": "x"})).status_code == 503
            assert (await c.get("/health")).status_code == 503
    asyncio.run(go())


def test_models_and_health():
    async def go():
        async with Engine().client() as c:
            return (await c.get("/v1/models")).json(), (await c.get("/health")).json(), (await c.get("/v1/models/toy")).json(), await c.get("/v1/models/org/other")
    models, health, one, other = asyncio.run(go())
    assert one == models["data"][0] and other.status_code == 404 and "org/other" in other.json()["error"]["message"]
    assert models["object"] == "list" and [m["id"] for m in models["data"]] == ["toy"] and models["data"][0]["object"] == "model"
    assert health["status"] == "ok"


def test_max_completion_tokens():
    engine = Engine()
    engine.post(CHAT, messages=HI, max_completion_tokens=7)
    assert engine.sent[0].params.max_tokens == 7
    assert Engine().post(CHAT, messages=HI, max_completion_tokens=7, max_tokens=8).json()["error"]["param"] == "max_completion_tokens"
    for path, body, expected in ((CHAT, {"messages": HI}, None), (TEXT, {"prompt": "x"}, 16), (GEN, {"prompt": "x"}, None)):
        engine = Engine()
        engine.post(path, **body)
        assert engine.sent[0].params.max_tokens == expected


def test_prompts_come_in_four_forms():
    assert [prompts_of(p) for p in ("a", ["a", "b"], [1, 2], [[1], [2]])] == [["a"], ["a", "b"], [[1, 2]], [[1], [2]]]
    for empty in ("", [], [""], [[]], [[1], []]):
        with pytest.raises(RequestError, match="empty"): prompts_of(empty)


def test_ten_thousand_deliveries_reach_their_sessions_in_order():
    async def go():
        sessions = [Session(i) for i in range(100)]
        async def read(s): return [(r.text, r.token_ids) async for _, r in s]
        tasks = [asyncio.create_task(read(s)) for s in sessions]
        for k in range(100):
            for s in sessions: s.deliver(ReplyMsg(s.uid, chr(k), [k], "stop" if k == 99 else None))
            if k % 7 == 0: await asyncio.sleep(0)
        for pieces in await asyncio.gather(*tasks):
            assert 14 <= len(pieces) <= 16  # what nobody had read yet came as one
            assert "".join(text for text, _ in pieces) == "".join(map(chr, range(100))) and sum((ids for _, ids in pieces), []) == list(range(100))
    asyncio.run(go())


def test_what_a_message_may_not_carry_is_refused_before_it_travels():
    deep = []
    for _ in range(500): deep = [deep]
    for extra in ({"name": deep}, {"name": 5}, {"tool_calls": []}, {"\ud800": 1}):
        r = Engine().post(CHAT, raw=json.dumps({"messages": [{"role": "user", "content": "hi", **extra}]}).encode())
        assert r.status_code == 400 and r.json()["error"]["message"]


def test_a_failed_forward_pass_is_our_fault():
    r = Engine(error=ErrorInfo("the forward pass failed: boom", None, "forward_failed")).post(CHAT, messages=HI)
    assert r.status_code == 500


# --- several choices, echo

@pytest.mark.parametrize("stream", [False, True])
def test_n_gives_n_choices_with_seeds_of_their_own_and_prompt_tokens_counted_once(stream):
    engine = Engine()
    r = engine.post(CHAT, messages=HI, n=3, seed=8, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    assert [p.seed for p in engine.asked] == [8, 9, 10] and not engine.frontend.sessions
    assert len(engine.sent) == 1, "the prompt travels once"
    if stream:
        *chunks, last, done = events_of(r)
        assert done == "[DONE]" and last["choices"] == [] and all(len(c["choices"]) == 1 for c in chunks)
        usage = last["usage"]
        for i in range(3):
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == i]
            assert mine[0]["delta"]["role"] == "assistant" and "".join(c["delta"].get("content") or "" for c in mine) == "Hello"
            assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
    else:
        doc = r.json()
        assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in doc["choices"]] == [(i, "Hello", "stop") for i in range(3)]
        usage = doc["usage"]
    assert usage == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 2}}


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2, 3]]])
def test_lists_of_prompts(prompt):
    engine = Engine()
    doc = engine.post(TEXT, prompt=prompt, n=2, seed=-2**63).json()
    assert [c["index"] for c in doc["choices"]] == [0, 1, 2, 3] and doc["usage"]["prompt_tokens"] == 10 and doc["usage"]["completion_tokens"] == 8
    assert [(m.uid, m.prompt) for m in engine.sent] == [(0, prompt[0]), (2, prompt[1])]
    assert [p.seed for p in engine.asked] == [-2**63, 1 - 2**63] * 2
    refused = Engine().post(GEN, prompt=prompt)
    assert refused.status_code == 400 and "list of 2" in refused.json()["error"]["message"]


@pytest.mark.parametrize("seed", [None, 0, 2**64 - 1, -1, -2**63])
def test_every_seed_has_neighbours(seed):
    engine = Engine()
    assert engine.post(TEXT, prompt="x", n=128, **({} if seed is None else {"seed": seed})).status_code == 200
    seeds = [p.seed for p in engine.asked]
    assert seeds == [None] * 128 if seed is None else seeds[0] == seed and len(set(seeds)) == 128


def test_one_choice_that_fails_ends_the_others():
    async def go(stream):
        engine = Engine()
        async def serve(uid):
            await asyncio.sleep(0)
            engine.frontend.deliver([ReplyMsg(uid, "x", [1]) if uid == 0 else ReplyMsg(uid, finish_reason="error", error=ErrorInfo("boom"))])
        engine.serve = serve
        async with engine.client() as c: r = await c.post(TEXT, json={"prompt": ["a", "b"], "stream": stream})
        assert not engine.frontend.sessions and [m.uid for m in engine.sent if isinstance(m, AbortMsg)] == [0]
        return r
    assert asyncio.run(go(False)).status_code == 500
    text = asyncio.run(go(True)).text
    assert "boom" in text and "[DONE]" not in text


def test_echo_begins_each_choice_with_its_prompt():
    body = {"prompt": ["Say ", "Cry "], "n": 2, "echo": True}
    assert [c["text"] for c in Engine().post(TEXT, **body).json()["choices"]] == ["Say Hello"] * 2 + ["Cry Hello"] * 2
    *chunks, _ = events_of(Engine().post(TEXT, stream=True, **body))
    assert ["".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == i) for i in range(4)] == ["Say Hello"] * 2 + ["Cry Hello"] * 2
    assert Engine().post(TEXT, prompt=[1, 2], echo=True).json()["error"]["param"] == "echo"


# --- penalties, bias, log-probabilities

def test_penalties_and_bias_reach_the_engine():
    engine = Engine()
    for path, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "x"}), (GEN, {"prompt": "x"})):
        assert engine.post(path, presence_penalty=1, frequency_penalty=-0.5, repetition_penalty=1.25, logit_bias={"7": -100, "50": 3.5}, **body).status_code == 200
    for m in engine.sent: assert (m.params.presence_penalty, m.params.frequency_penalty, m.params.repetition_penalty, m.params.logit_bias) == (1, -0.5, 1.25, ((7, -100), (50, 3.5)))


TOLD = [TokenText("Hé", tuple("Hé".encode()), -0.5, (TokenText("Hé", tuple("Hé".encode()), -0.5), TokenText("Ho", (72, 111), -1.5))),
        TokenText("\ufffd", (0xF0, 0x9F), -2.0, (TokenText("\ufffd", (0xF0, 0x9F), -2.0), TokenText("\ufffd", (0x90,), -2.5)), 2), TokenText("\ufffd", (0x99, 0x82), -0.25, (), 2), TokenText("<end>", tuple(b"<end>"), -3.0, (), 3)]


class Teller(Engine):
    async def serve(self, uid):
        await asyncio.sleep(0)
        for text, told, end in (("Hé", TOLD[:1], None), ("🙂", TOLD[1:3], None), ("", TOLD[3:], "stop")):
            self.frontend.deliver([ReplyMsg(uid, text, [1] * len(told), end, 5, 4, 0, logprobs=told)])
            await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(stream):
    engine = Teller()
    r = engine.post(CHAT, messages=HI, logprobs=True, top_logprobs=2, stream=stream)
    assert engine.sent[0].params.logprobs == 2
    docs = [c["choices"][0]["logprobs"] for c in events_of(r)[:-1]] if stream else [r.json()["choices"][0]["logprobs"]]
    content = [entry for d in docs if d for entry in d["content"]]
    assert [(c["token"], c["logprob"], c["bytes"]) for c in content] == [(t.token, t.logprob, list(t.bytes)) for t in TOLD]
    assert [c["token"] for c in content[0]["top_logprobs"]] == ["Hé", "Ho"] and set(content[0]["top_logprobs"][1]) == {"token", "logprob", "bytes"}
    if stream: assert docs[0] is None and all(d is None or d["refusal"] is None for d in docs)
    plain, bare = Engine(), Engine()
    assert plain.post(CHAT, messages=HI, logprobs=True).status_code == 200 and plain.sent[0].params.logprobs == 0
    assert bare.post(CHAT, messages=HI, logprobs=False).json()["choices"][0]["logprobs"] is None and bare.sent[0].params.logprobs is None
    for bad in ({"logprobs": False, "top_logprobs": 1}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}, {"logprobs": 2}): assert Engine().post(CHAT, messages=HI, **bad).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion(stream):
    engine = Teller()
    r = engine.post(TEXT, prompt="x", logprobs=2, stream=stream, n=2)
    assert engine.sent[0].params.logprobs == 2
    for i in range(2):
        docs = [c["choices"][0]["logprobs"] for c in events_of(r)[:-1] if c["choices"][0]["index"] == i] if stream else [r.json()["choices"][i]["logprobs"]]
        joined = {key: [x for d in docs if d for x in d[key]] for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        assert joined["tokens"] == ["Hé", "bytes:\\xf0\\x9f", "bytes:\\x99\\x82", "<end>"] and joined["token_logprobs"] == [-0.5, -2.0, -0.25, -3.0] and joined["text_offset"] == [0, 2, 2, 3]
        assert joined["top_logprobs"][0] == {"Hé": -0.5, "Ho": -1.5} and joined["top_logprobs"][3] == {"<end>": -3.0}
        assert joined["top_logprobs"][1] == {"bytes:\\xf0\\x9f": -2.0, "bytes:\\x90": -2.5}, "two halves of characters are two keys"
    assert Engine().post(TEXT, prompt="x", logprobs=1, echo=True).json()["error"]["param"] == "echo" and Engine().post(TEXT, prompt="x", logprobs=21).status_code == 400


def test_generate_takes_the_values_that_ask_for_nothing():
    engine = Engine()
    assert engine.post(GEN, prompt="x", logprobs=False).status_code == 200 and engine.sent[0].params.logprobs is None
    for bad in (True, 0, 1): assert Engine().post(GEN, prompt="x", logprobs=bad).json()["error"]["param"] == "logprobs"


def test_a_requests_messages_take_one_road_and_requests_take_turns():
    async def go():
        roads = [Engine(), Engine(), Engine()]
        frontend = FrontendManager(roads, None)
        for n in (2, 1, 2, 1): frontend.abort(frontend.submit([("x", SamplingParams())] * n))
        return [[(type(m).__name__, m.uid) for m in r.sent] for r in roads]
    Engine.serve, serve = lambda self, uid: asyncio.sleep(0), Engine.serve
    try: a, b, c = asyncio.run(go())
    finally: Engine.serve = serve
    assert a == [("TokenizeMsg", 0), ("AbortMsg", 0), ("AbortMsg", 1), ("TokenizeMsg", 5), ("AbortMsg", 5)]
    assert b == [("TokenizeMsg", 2), ("AbortMsg", 2)] and c == [("TokenizeMsg", 3), ("AbortMsg", 3), ("AbortMsg", 4)]


@pytest.mark.parametrize("method, path, allowed", [("GET", CHAT, "POST"), ("DELETE", "/v1/models", "GET"), ("PUT", GEN, "POST"), ("POST", "/health", "GET")])
def test_a_wrong_method_is_told_in_openais_form(method, path, allowed):
    async def go():
        async with Engine().client() as c: return await c.request(method, path), await c.request("HEAD", path)
    wrong, head = asyncio.run(go())
    assert wrong.status_code == 405 and allowed in wrong.headers["allow"]
    error = wrong.json()["error"]
    assert error["type"] == "invalid_request_error" and method in error["message"] and allowed in error["message"]
    assert head.content == b"" and head.status_code == (200 if allowed == "GET" else 405) and "x-request-id" in head.headers


# --- limits

def test_too_many_waiting_are_turned_away_at_once():
    async def go():
        engine = Engine(max_waiting=3)
        engine.serve = lambda uid: asyncio.sleep(0)
        async with engine.client() as c:
            calls = [asyncio.create_task(c.post(GEN, json={"prompt": "x"})) for _ in range(3)]
            await asyncio.sleep(0.05)
            for path, body in ((GEN, {"prompt": "x"}), (CHAT, {"messages": HI, "stream": True})):
                r = await c.post(path, json=body)
                assert r.status_code == 429 and int(r.headers["retry-after"]) >= 1 and r.json()["error"]["code"] == "rate_limit_exceeded"
            engine.frontend.deliver([ReplyMsg(0, "x", [1])])  # it does not wait any more: room for one
            fourth = asyncio.create_task(c.post(GEN, json={"prompt": "x"}))
            await asyncio.sleep(0.05)
            assert len(engine.frontend.sessions) == 4 and (await c.post(GEN, json={"prompt": "x"})).status_code == 429
            big = await c.post(TEXT, json={"prompt": "x", "n": 4})
            assert big.status_code == 400 and "3" in big.json()["error"]["message"]  # waiting would never help
            engine.frontend.deliver([ReplyMsg(uid, "x", [1], "stop") for uid in range(4)])
            assert [r.status_code for r in await asyncio.gather(*calls, fourth)] == [200] * 4
            assert not engine.frontend.waiting and engine.frontend.metrics.totals["rejected"] == 3
    asyncio.run(go())


def test_a_long_body_is_refused_before_it_is_parsed():
    engine = Engine(info={"max_body_bytes": 1000})
    assert engine.post(GEN, prompt="x" * 900).status_code == 200
    for raw in (b'{"prompt": "' + b"x" * 1000 + b'"}', b"[" * 100_000):
        r = engine.post(GEN, raw=raw)
        assert r.status_code == 413 and str(len(raw)) in r.json()["error"]["message"] and "1000" in r.json()["error"]["message"]
    async def chunked():  # nothing announced
        async def body():
            for _ in range(20): yield b"x" * 100
        async with engine.client() as c: return await c.post(GEN, content=body(), headers={"content-type": "application/json"})
    assert asyncio.run(chunked()).status_code == 413
    assert len(engine.sent) == 1


def test_a_body_without_end_is_cut_off():
    async def go():
        pieces, sent = 0, []
        async def receive():
            nonlocal pieces
            pieces += 1
            return {"type": "http.request", "body": b"x" * 100, "more_body": True}
        async def send(message): sent.append(message)
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": GEN, "raw_path": GEN.encode(), "query_string": b"",
                 "headers": [(b"content-type", b"application/json")], "scheme": "http", "server": ("toy", 80), "root_path": ""}
        await asyncio.wait_for(create_app(Engine().frontend, ServerInfo("toy", max_body_bytes=1000))(scope, receive, send), 5)
        assert sent[0]["status"] == 413 and 10 < pieces < 200
    asyncio.run(go())


@pytest.mark.parametrize("path, body", [(GEN, {"prompt": "x" * 2049}), (TEXT, {"prompt": ["x", "x" * 2049]}), (GEN, {"prompt": [1] * 64}), (CHAT, {"messages": [{"role": "user", "content": "x" * 2049}]}),
                                        (CHAT, {"messages": HI * 65})], ids=lambda x: str(x)[:30])
@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_fit_the_context_is_refused_unread(path, body, stream):
    engine = Engine()
    error = engine.post(path, stream=stream, **body).json()["error"]
    assert error["code"] == "context_length_exceeded" and "64" in error["message"] and engine.sent == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_request_that_takes_too_long_ends_with_an_error(stream, first):
    async def go():
        engine = Engine(request_timeout=0.2)
        async def serve(uid):
            if first: engine.frontend.deliver([ReplyMsg(uid, "x", [1])])
        engine.serve = serve
        async with engine.client() as c: r = await asyncio.wait_for(c.post(GEN, json={"prompt": "x", "stream": stream}), 5)
        if stream and first: assert r.status_code == 200 and "0.2 s" in r.text and "[DONE]" not in r.text
        else: assert r.status_code == 504 and "0.2 s" in r.json()["error"]["message"]
        assert [type(m) for m in engine.sent] == [TokenizeMsg, AbortMsg] and not engine.frontend.sessions and not engine.frontend.waiting
    asyncio.run(go())


def test_who_ends_in_time_hears_nothing_of_the_limit():
    async def go():
        engine = Engine(request_timeout=0.1)
        async with engine.client() as c: assert (await c.post(GEN, json={"prompt": "x"})).status_code == 200
        await asyncio.sleep(0.15)
        assert [type(m) for m in engine.sent] == [TokenizeMsg] and engine.frontend.metrics.totals["error"] == 0
    asyncio.run(go())


def test_a_client_that_never_reads_costs_one_reply_for_each_choice():
    async def go():
        engine, blocked = Engine(), asyncio.Event()
        engine.serve = lambda uid: asyncio.sleep(0)
        app = create_app(engine.frontend, ServerInfo("toy"))
        async def receive():
            if not engine.sent: return {"type": "http.request", "body": json.dumps({"prompt": "x", "n": 2, "stream": True}).encode(), "more_body": False}
            await asyncio.sleep(60)
        async def send(message):
            if message["type"] == "http.response.body": await blocked.wait()
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": TEXT, "raw_path": TEXT.encode(), "query_string": b"",
                 "headers": [(b"content-type", b"application/json")], "scheme": "http", "server": ("toy", 80), "root_path": ""}
        call = asyncio.create_task(app(scope, receive, send))
        while len(engine.frontend.sessions) < 2: await asyncio.sleep(0.01)
        session = engine.frontend.sessions[0]
        for i in range(5000): engine.frontend.deliver([ReplyMsg(i % 2, "x", [i])])
        assert len(session.unread) <= 2
        await asyncio.sleep(0.05)
        for i in range(5000): engine.frontend.deliver([ReplyMsg(i % 2, "x", [i])])
        assert len(session.unread) == 2 and len(session.unread[0].token_ids) + len(session.unread[1].token_ids) >= 5000
        engine.frontend.deliver([ReplyMsg(uid, "", [], "length") for uid in (0, 1)])
        assert not engine.frontend.sessions  # the engine has forgotten it
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    asyncio.run(go())


# --- the gate

def test_the_key_opens_and_nothing_else_does():
    engine = Engine(info={"api_key": "s3cret"})
    async def go():
        async with engine.client() as c:
            for headers in ({}, {"authorization": "s3cret"}, {"authorization": "Bearer s3cre"}, {"authorization": "Bearer s3crets"}, {"authorization": b"Bearer \xff"}):
                for method, path in (("POST", GEN), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/stats"), ("GET", "/nowhere")):
                    r = await c.request(method, path, headers=headers, **({"json": {"prompt": "x"}} if method == "POST" else {}))
                    assert r.status_code == 401 and r.json()["error"]["code"] == "invalid_api_key" and "s3cret" not in r.text
            assert engine.sent == []
            for path in ("/", "/docs", "/openapi.json", "/health", "/health/live"): assert (await c.get(path)).status_code == 200
            assert (await c.post(GEN, json={"prompt": "x"}, headers={"authorization": "Bearer s3cret"})).status_code == 200
    asyncio.run(go())
    assert "s3cret" not in repr(ServerInfo("toy", api_key="s3cret"))


def test_request_ids_are_returned_or_made():
    engine = Engine()
    assert engine.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {engine.get(path, headers=headers).headers["x-request-id"] for path in ("/health", "/nowhere") for headers in ({}, {"x-request-id": "x" * 500}, {"x-request-id": b"\xff"})}
    assert len(made) == 6 and all(len(m) == 32 for m in made)
    assert "x-request-id" in engine.post(GEN, prompt="x", stream=True).headers and "x-request-id" in engine.post(GEN, raw=b"{").headers


def test_other_sites_pages_may_not_call_unless_named():
    ask = {"origin": "http://elsewhere", "access-control-request-method": "POST", "access-control-request-headers": "content-type, authorization"}
    async def preflight(engine):
        async with engine.client() as c: return await c.options(GEN, headers=ask)
    assert "access-control-allow-origin" not in asyncio.run(preflight(Engine())).headers
    assert asyncio.run(preflight(Engine(info={"cors_origins": "http://a,http://elsewhere", "api_key": "k"}))).headers["access-control-allow-origin"] == "http://elsewhere"
    assert asyncio.run(preflight(Engine(info={"cors_origins": "http://a"}))).status_code == 400


# --- what it says about itself

def test_every_route_says_what_it_is_for():
    engine = Engine()
    async def go():
        async with engine.client() as c: return c._transport.app.routes, (await c.get("/openapi.json")).json(), await c.get("/docs"), await c.get("/redoc")
    routes, schema, docs, redoc = asyncio.run(go())
    assert not [r.path for r in routes if r.include_in_schema and not r.summary]
    told = {(path, method): op for path, methods in schema["paths"].items() for method, op in methods.items()}
    assert {path for path, _ in told} >= {CHAT, TEXT, GEN, "/v1/models", "/health", "/metrics", "/docs", "/"}
    assert all("422" not in op["responses"] and "default" in op["responses"] for op in told.values()), "a bad request is told with 400"
    assert "/openapi.json" in schema["info"]["description"] and "/docs" in schema["info"]["description"] and "Bearer" in schema["info"]["description"]
    assert docs.headers["content-type"].startswith("text/plain") and "http" not in docs.text.replace("/health", ""), "nothing from elsewhere"
    for (path, method), op in told.items(): assert any(line.split()[:2] == [method.upper(), path] and line.endswith(op["summary"]) for line in docs.text.splitlines())
    assert redoc.status_code == 404


def test_metrics_count_what_happened():
    from prometheus_client.parser import text_string_to_metric_families as parse
    async def go():
        engine = Engine()
        engine.frontend.deliver([StatsMsg({"waiting": 1, "running": 2, "pages_used": 3, "pages_cached": 4, "pages_free": 5, "batch_size": 2, "retracted": 6, "decode_steps": 7})])
        async with engine.client() as c:
            for body in ({"prompt": "x"}, {"prompt": ["x", "y"], "stream": True}): await c.post(TEXT, json=body)
            left = engine.frontend.submit([("x", SamplingParams())])
            engine.frontend.abort(left)
            r = await c.get("/metrics")
            assert r.headers["content-type"].startswith("text/plain")
            return {(s.name, *s.labels.values()): s.value for f in parse(r.text) for s in f.samples}
    got = asyncio.run(go())
    assert {k[1]: v for k, v in got.items() if k[0] == "minisgl_requests_total"} == {"stop": 3, "length": 0, "abort": 1, "error": 0}
    assert got["minisgl_requests_in_flight", "waiting"] == 1 and got["minisgl_requests_in_flight", "running"] == 2
    assert [got["minisgl_pages", s] for s in ("used", "cached", "free")] == [3, 4, 5] and got["minisgl_batch_size",] == 2 and got["minisgl_preemptions_total",] == 6
    assert got["minisgl_tokens_total", "generated"] == 6 and got["minisgl_tokens_total", "prompt"] == 15 and got["minisgl_prefix_hit_rate",] == 6 / 15
    assert got["minisgl_time_to_first_token_seconds_count",] == 3 and got["minisgl_inter_token_seconds_count",] == 3 and got["minisgl_request_seconds_count",] == 4
    assert got["minisgl_steps_total", "decode"] == 7


def test_two_apps_do_not_mix_their_numbers():
    a, b = Engine(), Engine()
    a.post(GEN, prompt="x")
    assert 'reason="stop"} 1.0' in a.get("/metrics").text and 'reason="stop"} 0.0' in b.get("/metrics").text


def test_live_is_not_ready():
    engine = Engine()
    assert engine.get("/health").status_code == engine.get("/health/live").status_code == 200
    engine.frontend.failure = "the scheduler died"
    assert engine.get("/health").status_code == 503 and engine.get("/health/live").status_code == 200


def test_stats_ask_for_the_page_map():
    engine = Engine()
    engine.frontend.deliver([StatsMsg({"running": 1, "pages": "..cu"})])
    doc = engine.get("/stats").json()
    assert doc["scheduler"]["pages"] == "..cu" and doc["model"] == "toy" and doc["totals"] == {} and engine.sent == [WatchMsg()]


def test_every_documented_parameter_is_supported_or_refused_by_name():
    from minisgl_edu.server import NEUTRAL, ChatBody, CompletionBody
    chat = pytest.importorskip("openai.types.chat.completion_create_params").CompletionCreateParamsBase
    text = pytest.importorskip("openai.types.completion_create_params").CompletionCreateParamsBase
    for documented, body in ((chat, ChatBody), (text, CompletionBody)):
        assert documented.__annotations__.keys() - body.model_fields.keys() <= NEUTRAL.keys()
    for name, neutral in NEUTRAL.items():
        if name in ChatBody.model_fields: continue
        for value in (None, *neutral): assert Engine().post(CHAT, messages=HI, **{name: value}).status_code == 200, (name, value)
        for value in (True, 3.5, "x", {"a": 1}, ["x"]):
            r = Engine().post(CHAT, messages=HI, **{name: value})
            assert r.status_code == 400 and name in r.json()["error"]["message"], (name, value)


# --- fuzz: bodies made from the app's own OpenAPI document

def fields_of(path):
    "Names of the fields that the document gives for a path, and one that it does not"
    schema = create_app(Engine().frontend, ServerInfo("toy", 64)).openapi()
    ref = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return sorted(schema["components"]["schemas"][ref.rsplit("/", 1)[1]]["properties"]) + ["tools", "\ud800"]


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6)
SENSIBLE = st.sampled_from([0, 1, 2, 0.5, True, "x", ["a", "b"], [1, 2], HI, {"include_usage": True}, {"5": 1.0}])


@pytest.mark.parametrize("path", [CHAT, TEXT, GEN])
def test_no_body_makes_a_server_error_or_a_hang(path):
    engine, start = Engine(), {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    seen = set()
    async def send(client, raw):
        r = await asyncio.wait_for(client.post(path, content=raw, headers={"content-type": "application/json"}), 10)
        assert r.status_code < 500, (raw, r.text)
        if r.status_code >= 400: assert r.json()["error"]["message"], raw
        assert not engine.frontend.sessions and not engine.frontend.waiting
        seen.add(r.status_code)
    loop = asyncio.new_event_loop()
    try:
        client = engine.client()
        @settings(max_examples=250)
        @given(st.dictionaries(st.sampled_from(fields_of(path)), SENSIBLE | JSON, max_size=4))
        def mixed(body): loop.run_until_complete(send(client, json.dumps(start | body).encode()))
        @settings(max_examples=60)
        @given(st.binary(max_size=200) | JSON.map(lambda x: json.dumps(x).encode()))
        def garbage(raw): loop.run_until_complete(send(client, raw))
        mixed()
        garbage()
        loop.run_until_complete(client.aclose())
    finally: loop.close()
    assert 200 in seen and 400 in seen


def test_a_refusal_does_not_send_the_request_back():
    "However large the value that is refused, its echo is short"
    async def go():
        async with Engine().client() as c:
            return [await c.post("/v1/completions", json={"prompt": "hi", **extra}) for extra in ({"tools": "x" * 100_000}, {"x" * 50_000: 1}, {"n": 10**4000}, {"seed": -10**4000}, {"model": "m" * 90_000})]
    for answer in asyncio.run(go()): assert answer.status_code in (400, 404) and len(answer.content) < 2_000, answer.content[:300]
