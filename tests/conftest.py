"Fixtures that all tests share: a tiny random model, the default model, its tokenizer"
import json, os

# Before torch and tokenizers start their threads; spawned workers inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # idle threads that spin starve the processes beside them
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")     # a test that needs the hub is a bug
os.environ.setdefault("TRITON_INTERPRET", "1")   # frozen when triton is imported

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(2)

settings.register_profile("minisgl", derandomize=True, deadline=None, database=None, max_examples=50,
                          suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large])
settings.load_profile("minisgl")

# Two KV heads under four query heads, so that grouped-query attention is exercised; every size divides by 2 ranks.
TINY_CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu",
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=10000.0,
    attention_bias=False, mlp_bias=False, tie_word_embeddings=True,
    initializer_range=0.4,  # large enough that greedy choices differ from position to position
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)


@pytest.fixture(scope="session")
def tiny_config():
    "The tiny model's `config.json`, as a fresh dictionary"
    return dict(TINY_CONFIG)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory, tiny_config):
    "A small random Llama directory: 2 layers, hidden 32, 4 query and 2 KV heads; load it in float64 for exact comparisons"
    from minisgl_edu.checkpoint import save_random_model
    path = tmp_path_factory.mktemp("tiny_llama")
    save_random_model(path, tiny_config, seed=0)
    return path


@pytest.fixture(scope="session")
def model_dir():
    "The default model's directory (fetched and converted the first time)"
    from minisgl_edu.checkpoint import default_model
    return default_model()


@pytest.fixture(scope="session")
def tokenizer(model_dir):
    "The default model's tokenizer"
    from minisgl_edu.text import load_tokenizer
    return load_tokenizer(model_dir)


@pytest.fixture
def make_engine(tiny_model_dir):
    "Engines over the tiny float64 model; closed at the end"
    from minisgl_edu.engine import Engine, EngineConfig
    engines = []
    def make(**kw):
        kw = dict(model=str(tiny_model_dir), dtype="float64", device="cpu", num_pages=64, max_running_requests=8) | kw
        engines.append(Engine(EngineConfig(**kw)))
        return engines[-1]
    yield make
    for e in engines: e.close()


def greedy(max_tokens):
    "Greedy to the last token"
    from minisgl_edu.core import SamplingParams
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


async def stream_text(client, body):
    "The whole text of one stream of `/generate`, which must end in order"
    text, done = "", False
    async with client.stream("POST", "/generate", json={**body, "stream": True}) as r:
        assert r.status_code == 200
        async for line in r.aiter_lines():
            if line == "data: [DONE]": done = True
            elif line: text += json.loads(line[6:])["text"]
    assert done
    return text
