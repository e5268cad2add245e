"Five hundred requests while clients leave, send garbage and read slowly; then the limits over a real socket"
import asyncio, json, os, random, socket, time
from pathlib import Path

import httpx
import pytest

from conftest import stream_text
from minisgl_edu.checkpoint import save_random_model
from minisgl_edu.launch import ServerConfig, start_server

PROMPTS = ["Once upon a time", "The sea is", "1, 2, 3,", "从前有一个国王，", "👩‍👩‍👧 and", "def f(x):", [5, 6, 7], [9] * 40]


@pytest.fixture(scope="module")
def model(tmp_path_factory, tiny_config, tokenizer):
    config = {**tiny_config, "vocab_size": len(tokenizer), "num_hidden_layers": 1, "max_position_embeddings": 1024}
    return str(save_random_model(tmp_path_factory.mktemp("faults")/"tiny", config, tokenizer=tokenizer))


@pytest.fixture(scope="module")
def server(model):
    "float64: greedy answers do not depend on who else is in the batch"
    with start_server(model=model, port=0, dtype="float64", max_running_requests=16, num_pages=300, page_size=4, max_prefill_length=64, request_timeout=60) as handle: yield handle


def memory(server)->float: # MB of this process and the workers
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (os.getpid(), *server.pids.values())) * os.sysconf("SC_PAGE_SIZE") / 1e6


def tasks(server): return len(asyncio.all_tasks(server.frontend._loop))


def wait_until_idle(server):
    end = time.monotonic() + 20
    while True:
        stats = httpx.get(f"{server.url}/health", timeout=20).json()
        s = stats["scheduler"]
        if stats["in_flight"] == s["running"] == s["waiting"] == s["pages_used"] == 0: return s
        assert time.monotonic() < end, stats
        time.sleep(0.05)


async def raw(server, data, read=0, pause=0.0, close_after=None):
    "Send bytes, read some (slowly), leave"
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        writer.write(data)
        await writer.drain()
        if close_after is not None: await asyncio.sleep(close_after)
        got = b""
        try:
            while len(got) < read and (piece := await asyncio.wait_for(reader.read(200), 2)):
                got += piece
                await asyncio.sleep(pause)
        except (asyncio.TimeoutError, OSError): pass  # half a request line: it waits for the rest, and we leave
        return got
    finally:
        writer.close()
        try: await writer.wait_closed()
        except OSError: pass


def http(path, body): return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def five_hundred(server, rng, alone):
    gate, wrong = asyncio.Semaphore(48), []
    async def one(client, i):
        kind, prompt = rng.choice(["stream", "stream", "whole", "whole", "choices", "leave", "leave", "half", "garbage", "bad", "slow"]), rng.randrange(len(PROMPTS))
        body = {"prompt": PROMPTS[prompt], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        delay, noise = rng.random() * 0.15, rng.randbytes(rng.randrange(400))
        async with gate:
            if kind == "stream": texts = [await stream_text(client, body)]
            elif kind == "whole": texts = [(await client.post("/generate", json=body)).json()["text"]]
            elif kind == "choices":
                r = await client.post("/v1/completions", json={**body, "prompt": [PROMPTS[prompt]], "n": 2})
                texts = [c["text"] for c in r.json()["choices"]]
            else: texts = []
            long = json.dumps({**body, "max_tokens": 150, "stream": i % 2 == 0}).encode()
            if kind == "leave": await raw(server, http("/generate", long), close_after=delay)
            if kind == "half": await raw(server, http("/generate", long)[:-rng.randrange(1, 60)], close_after=delay)
            if kind == "garbage": await raw(server, noise if i % 2 else http("/v1/completions", noise), read=100)
            if kind == "slow": await raw(server, http("/generate", json.dumps({**body, "stream": True}).encode()), read=900, pause=0.02)
            if kind == "bad":
                r = await client.post("/v1/completions", json={**body, rng.choice(["temperature", "n", "stop", "prompt", "nonsense", "max_tokens"]): rng.choice([-1, {}, [None]])})
                if not 400 <= r.status_code < 500: wrong.append((i, kind, r.status_code, r.text))
        wrong.extend((i, kind, alone[prompt], t) for t in texts if t != alone[prompt])
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=60)) as client:
        await asyncio.gather(*(one(client, i) for i in range(500)))
    return wrong


def test_five_hundred_mixed_requests_leave_nothing_behind(server):
    async def solo():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return [await stream_text(client, {"prompt": p, "max_tokens": 12, "temperature": 0, "ignore_eos": True}) for p in PROMPTS]
    alone = asyncio.run(solo())
    wait_until_idle(server)
    quiet, before = tasks(server), memory(server)
    wrong = asyncio.run(five_hundred(server, random.Random(0), alone))
    assert not wrong, wrong[:3]
    stats = wait_until_idle(server)
    assert stats["pages_free"] + stats["pages_cached"] == stats["pages_total"] == 300 and stats["rows_free"] == 16
    assert not server.frontend.sessions and not server.frontend.waiting
    end = time.monotonic() + 10
    while tasks(server) > quiet + 1 and time.monotonic() < end: time.sleep(0.05)  # one for this very look, perhaps
    assert tasks(server) <= quiet + 1
    assert memory(server) - before < 100
    totals = server.frontend.metrics.totals
    assert totals["abort"] > 20 and totals["error"] == 0
    assert asyncio.run(solo()) == alone


def test_fifty_megabytes_do_not_stall_the_others(server):
    "A prompt that is too long is refused, and a small request beside it is answered at once"
    async def go():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            big = asyncio.create_task(client.post("/generate", json={"prompt": "x " * 25_000_000}))
            within = asyncio.create_task(client.post("/generate", json={"prompt": "x " * 400_000}))
            small = await client.post("/generate", json={"prompt": "Hi", "max_tokens": 2})
            return await big, await within, small
    big, within, small = asyncio.run(go())
    assert big.status_code == 413 and within.status_code == 400 and small.status_code == 200
    assert within.json()["error"]["code"] == "context_length_exceeded"
    wait_until_idle(server)


def test_a_client_that_never_reads_holds_no_page(server):
    body = json.dumps({"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}).encode()
    with socket.create_connection((server.host, server.port), timeout=30) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        s.sendall(http("/generate", body))
        end = time.monotonic() + 60
        while not server.frontend.sessions and time.monotonic() < end: time.sleep(0.01)
        wait_until_idle(server)  # the answer is made to its end, and waits as text


def test_limits_and_ids_over_a_socket(model):
    with start_server(model=model, port=0, max_running_requests=1, num_pages=2000, page_size=1, max_waiting=1, request_timeout=1.0, api_key="k") as server:
        async def go():
            async with httpx.AsyncClient(base_url=server.url, timeout=60, headers={"Authorization": "Bearer k", "x-request-id": "mine"}) as client:
                body = {"prompt": "Hi", "max_tokens": 1000, "ignore_eos": True}
                calls = await asyncio.gather(*(client.post("/generate", json=body) for _ in range(6)))
                bare = await client.post("/generate", json=body, headers={"Authorization": "x"})
                return calls, bare, await client.get("/metrics")
        calls, bare, metrics = asyncio.run(go())
        assert {r.status_code for r in calls} <= {200, 429, 504} and any(r.status_code == 429 and r.headers["retry-after"] for r in calls)
        assert all(r.headers["x-request-id"] == "mine" for r in calls) and bare.status_code == 401
        assert "minisgl_requests_total" in metrics.text and "minisgl_requests_rejected_total 0.0" not in metrics.text
        wait_until_idle(server)


@pytest.mark.parametrize("options, word", [({"max_waiting": 0}, "max_waiting"), ({"max_waiting": 1.5}, "max_waiting"), ({"request_timeout": 0}, "request_timeout"), ({"request_timeout": float("nan")}, "request_timeout"),
                                           ({"max_body_bytes": 0}, "max_body_bytes"), ({"api_key": " "}, "api_key")])
def test_limits_are_checked_by_name(options, word):
    with pytest.raises(ValueError, match=word): ServerConfig(**options)


def test_the_key_comes_from_the_environment_and_is_not_shown(monkeypatch):
    assert ServerConfig().api_key is None
    monkeypatch.setenv("MINISGL_API_KEY", "s3cret")
    assert ServerConfig().api_key == "s3cret" and ServerConfig(api_key="mine").api_key == "mine" and "s3cret" not in repr(ServerConfig())
    monkeypatch.setenv("MINISGL_API_KEY", "")
    with pytest.raises(ValueError, match="api_key"): ServerConfig()


def test_every_setting_of_the_server_has_a_flag():
    from dataclasses import fields
    from minisgl_edu.cli import SERVER_FLAGS, build_parser, given
    from minisgl_edu.engine import EngineConfig
    assert {f.name for f in fields(ServerConfig)} - {f.name for f in fields(EngineConfig)} - {f.field for f in SERVER_FLAGS} <= {"start_timeout"}
    args = build_parser().parse_args("serve --max-waiting 5 --request-timeout 2.5 --max-body-bytes 100 --api-key k --cors-origins http://a".split())
    config = ServerConfig(**given(args, SERVER_FLAGS))
    assert (config.max_waiting, config.request_timeout, config.max_body_bytes, config.api_key, config.cors_origins) == (5, 2.5, 100, "k", "http://a")
