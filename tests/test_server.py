"The HTTP app over a toy engine: shapes, refusals, disconnects, failures"
import asyncio, json

import httpx
import pytest

from minisgl_edu.core import RequestError, SamplingParams
from minisgl_edu.messages import AbortMsg, ErrorInfo, ReplyMsg, TokenizeMsg
from minisgl_edu.server import FrontendManager, ServerInfo, Session, create_app, one_prompt, plain_messages


class Engine:
    "Answers with the given replies; records what it was sent"
    def __init__(self, replies=("Hel", "lo"), finish="stop", error=None):
        self.sent, self.replies, self.finish, self.error = [], replies, finish, error
        self.frontend = FrontendManager([self], None)
        async def no_listening(): self.frontend._loop = asyncio.get_running_loop()
        self.frontend.start = no_listening

    def send(self, msgs):
        self.sent += msgs
        for m in msgs:
            if isinstance(m, TokenizeMsg): asyncio.get_running_loop().create_task(self.serve(m.uid))

    async def serve(self, uid):
        await asyncio.sleep(0)
        if self.error: return self.frontend.deliver([ReplyMsg(uid, finish_reason="error", error=self.error)])
        for i, text in enumerate(self.replies, 1):
            end = self.finish if i == len(self.replies) else None
            self.frontend.deliver([ReplyMsg(uid, text, [i], end, prompt_tokens=5, completion_tokens=i, cached_tokens=2)])
            await asyncio.sleep(0)

    def client(self):
        app = create_app(self.frontend, ServerInfo("toy", 64))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=True), base_url="http://toy")

    def post(self, path, raw=None, **body):
        async def go():
            async with self.client() as c:
                return await (c.post(path, content=raw) if raw is not None else c.post(path, json=body))
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
    ({"max_tokens": 1.5}, "max_tokens"), ({"stop": ""}, "stop"), ({"stop": [1]}, "stop"), ({"seed": "x"}, "seed"), ({"n": 0}, "n"), ({"n": 2}, "n"),
    ({"n": True}, "n"), ({"logprobs": True}, "logprobs"), ({"frequency_penalty": 0.1}, "frequency_penalty"), ({"tools": [{}]}, "tools"), ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"stream": "yes"}, "stream"), ({"stream_options": {"include_usage": True}}, "stream_options"), ({"nonsense": 1}, "nonsense"), ({"ignore_eos": 1}, "ignore_eos"),
]


@pytest.mark.parametrize("fields, param", BAD, ids=lambda x: str(x)[:40])
@pytest.mark.parametrize("path", [CHAT, TEXT, GEN])
def test_a_bad_field_is_refused_by_name_and_never_reaches_the_engine(path, fields, param):
    engine = Engine()
    r = engine.post(path, **({"messages": HI} if path == CHAT else {"prompt": "Hi"}), **fields)
    error = r.json()["error"]
    assert r.status_code == 400 and error["type"] == "invalid_request_error" and error["message"]
    if param: assert (error["param"] or "").startswith(param) and param in error["message"]
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
    assert r.status_code == 400 and r.json()["error"]["param"].startswith("messages")


@pytest.mark.parametrize("prompt", [[], ["a", "b"], [[1], [2]], [1, "a"], 7, None, {"a": 1}])
def test_bad_prompts(prompt):
    r = Engine().post(TEXT, prompt=prompt)
    assert r.status_code == 400 and r.json()["error"]["param"].startswith("prompt")


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
        async with Engine().client() as c: return (await c.get("/v1/models")).json(), (await c.get("/health")).json()
    models, health = asyncio.run(go())
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


def test_helpers():
    assert plain_messages([{"role": "assistant", "content": None}])[0]["content"] == ""
    assert one_prompt(["a"]) == "a" and one_prompt([1, 2]) == [1, 2]
    with pytest.raises(RequestError): plain_messages([])
    with pytest.raises(RequestError): one_prompt([])


def test_ten_thousand_deliveries_reach_their_sessions_in_order():
    async def go():
        sessions = [Session(i) for i in range(100)]
        async def read(s): return [r.completion_tokens async for r in s]
        tasks = [asyncio.create_task(read(s)) for s in sessions]
        for k in range(100):
            for s in sessions: s.deliver(ReplyMsg(s.uid, completion_tokens=k, finish_reason="stop" if k == 99 else None))
            if k % 7 == 0: await asyncio.sleep(0)
        assert await asyncio.gather(*tasks) == [list(range(100))] * 100
    asyncio.run(go())


def test_what_a_message_may_not_carry_is_refused_before_it_travels():
    deep = []
    for _ in range(500): deep = [deep]
    for extra in ({"name": deep}, {"name": "bob"}, {"\ud800": 1}):
        r = Engine().post(CHAT, raw=json.dumps({"messages": [{"role": "user", "content": "hi", **extra}]}).encode())
        assert r.status_code == 400 and r.json()["error"]["message"]


def test_a_failed_forward_pass_is_our_fault():
    r = Engine(error=ErrorInfo("the forward pass failed: boom", None, "forward_failed")).post(CHAT, messages=HI)
    assert r.status_code == 500
