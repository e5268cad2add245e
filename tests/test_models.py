"The decoder and its dense attention against transformers: the oracle has an oracle too"
import threading

import pytest
import torch

from minisgl_edu.checkpoint import ModelConfig, default_model, load_weights, save_random_model
from minisgl_edu.core import EXAMPLES, AttentionBackend, ForwardContext
from minisgl_edu.distributed import TPGroup, run_ranks
from minisgl_edu.layers import TorchOps
from minisgl_edu.models import DenseAttention, create_model, full_context, generate_naive

TINY = dict(model_type="llama", vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=12,
    num_key_value_heads=4, max_position_embeddings=256, rope_theta=10000.0, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32, rope_theta=10000.0)
VARIANTS = {
    "mha": dict(num_key_value_heads=12), "gqa2": dict(num_key_value_heads=6), "gqa3": {}, "gqa6": dict(num_key_value_heads=2), "mqa": dict(num_key_value_heads=1),
    "untied": dict(tie_word_embeddings=False), "wide heads": dict(head_dim=16), "llama3 rope": dict(rope_parameters=LLAMA3),
    "theta": dict(rope_theta=500000.0), "eps": dict(rms_norm_eps=1e-2),
}


def family(model_type, **change): return dict(model_type=model_type, initializer_range=0.2, **change)


YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=32, rope_theta=10000.0)
SPARSE = dict(head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
FAMILIES = {  # contexts of up to 60 tokens, the original ones are 32 at most
    "mistral": family("mistral", sliding_window=None), "mistral, a window as wide as the context": family("mistral", sliding_window=256), "mistral untied": family("mistral", sliding_window=None, tie_word_embeddings=False),
    "qwen2": family("qwen2"), "qwen2 untied": family("qwen2", tie_word_embeddings=False, num_key_value_heads=2), "qwen2, a window not used": family("qwen2", sliding_window=8),
    "qwen3": family("qwen3", head_dim=16), "qwen3 untied": family("qwen3", head_dim=4, tie_word_embeddings=False),
    "linear": dict(rope_parameters=dict(rope_type="linear", factor=8.0, rope_theta=10000.0)), "yarn": dict(rope_parameters=YARN), "qwen3 yarn": family("qwen3", head_dim=16, rope_parameters=YARN),
    "yarn in full": dict(rope_parameters=dict(YARN, beta_fast=4.0, beta_slow=0.5, mscale=1.0, mscale_all_dim=0.7, truncate=False)), "mistral yarn": family("mistral", sliding_window=None, rope_parameters=dict(YARN, attention_factor=1.3)),
    "moe": family("qwen3_moe", **SPARSE), "moe, untied, yarn": family("qwen3_moe", tie_word_embeddings=False, rope_parameters=YARN, **SPARSE),
    "moe, every second layer": family("qwen3_moe", decoder_sparse_step=2, **SPARSE), "moe, one dense layer": family("qwen3_moe", mlp_only_layers=[1], **SPARSE),
    "moe, shares as they are": family("qwen3_moe", **{**SPARSE, "norm_topk_prob": False, "num_experts_per_tok": 3}), "moe without experts": family("qwen3_moe", **{**SPARSE, "num_experts": 0}),
}
VARIANTS |= FAMILIES


def prompts(*lens, vocab=96, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=gen).tolist() for n in lens]


def load(path, dtype, ops=None, attention=None, **kwargs):
    model = create_model(ModelConfig.from_dir(path), ops or TorchOps(), attention or DenseAttention(), **kwargs)
    load_weights(model, path, "cpu", dtype)
    return model


def load_hf(path, dtype):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval() # its fast one has no float64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    "Directory of a tiny random model, made once for each variant"
    made = {}
    def get(variant="gqa3"):
        if variant not in made: made[variant] = save_random_model(tmp_path_factory.mktemp("tiny"), {**TINY, **VARIANTS[variant]}, seed=1)
        return made[variant]
    return get


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_equal_transformers(tiny, variant):
    model, hf = load(tiny(variant), torch.float32), load_hf(tiny(variant), torch.float32)
    ids = prompts(1, 7, 60, 2)
    got = model(full_context(ids))
    want = torch.cat([hf(torch.tensor([i])).logits[:, -1] for i in ids])
    assert got.shape == (4, 96) and got.dtype == torch.float32 and want.std() > 0.01
    assert ((got - want).abs().max() / want.abs().max()).item() < 1e-5


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in FAMILIES]) # those go through the engine, below
@torch.inference_mode()
def test_greedy_tokens_equal_transformers_in_float64(tiny, variant):
    model, hf = load(tiny(variant), torch.float64), load_hf(tiny(variant), torch.float64)
    assert model(full_context([[1]])).dtype == torch.float64
    for ids in prompts(1, 9, 33, seed=3):
        mask = torch.ones(1, len(ids), dtype=torch.int64) # without it, token 0 in a prompt would count as padding
        want = hf.generate(torch.tensor([ids]), attention_mask=mask, do_sample=False, max_new_tokens=24, eos_token_id=None)[0, len(ids):].tolist()
        assert generate_naive(model, ids, 24) == want


@torch.inference_mode()
def test_a_batch_equals_each_request_alone(tiny):
    model = load(tiny(), torch.float64)
    ids = prompts(5, 1, 17, 2, 40)
    together = model(full_context(ids))
    for i, row in zip(ids, together): torch.testing.assert_close(model(full_context([i]))[0], row, rtol=1e-12, atol=1e-12)


def test_end_of_sequence_and_limit_end_generation(tiny):
    model = load(tiny(), torch.float64)
    tokens = generate_naive(model, [5, 6, 7], 12)
    assert len(tokens) == 12
    end = tokens[4]
    assert generate_naive(model, [5, 6, 7], 12, eos=[end]) == tokens[:tokens.index(end) + 1]
    assert generate_naive(model, [5, 6, 7], 1) == tokens[:1]


class CountingOps(TorchOps):
    def __init__(self): self.rows = []
    def linear(self, x, weight, bias=None):
        self.rows.append((len(x), weight.shape[0]))
        return super().linear(x, weight, bias)


@torch.inference_mode()
def test_four_matrices_a_layer_and_a_head_for_last_tokens_only(tiny):
    ops = CountingOps()
    load(tiny(), torch.float32, ops)(full_context(prompts(5, 3)))
    assert len(ops.rows) == 4 * 3 + 1
    assert ops.rows[-1] == (2, 96) and all(rows == 8 for rows, _ in ops.rows[:-1])


@torch.inference_mode()
def test_tied_head_is_the_embedding(tiny, monkeypatch):  # F35
    model = load(tiny(), torch.float32)
    assert model.head.weight is model.embedding.weight
    seen, norm = [], model.norm.forward
    monkeypatch.setattr(model.norm, "forward", lambda *a: seen.append(norm(*a)) or seen[-1])
    got = model(full_context(prompts(4, 6)))
    assert (got - seen[0][0] @ model.embedding.weight.T).abs().max() <= 1e-5


def _rank_logits(group, path, ids):
    model = create_model(ModelConfig.from_dir(path), TorchOps(), DenseAttention(), group)
    load_weights(model, path, "cpu", torch.float32)
    with torch.inference_mode(): return model(full_context(ids)).numpy(), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("variant", ["gqa3", "untied"])
def test_two_ranks_give_the_logits_of_one(tiny, variant):  # F35, F33
    ids = prompts(6, 1, 11, 3)
    with torch.inference_mode(): want = load(tiny(variant), torch.float32)(full_context(ids))
    whole = sum(p.numel() for p in load(tiny(variant), torch.float32).parameters())
    for got, numel in run_ranks(_rank_logits, 2, str(tiny(variant)), ids):
        assert (torch.from_numpy(got) - want).abs().max() < 1e-4 and numel < 0.52 * whole
        assert torch.equal(torch.from_numpy(got).argmax(-1), want.argmax(-1))


class ThreadRank(TPGroup):
    "A rank in a thread of this process: collectives meet at a barrier"
    def __init__(self, rank, size, barrier, parts):
        super().__init__(rank, size)
        self.meet, self.parts = barrier, parts

    def exchange(self, t):
        self.parts[self.rank] = t.clone()
        self.meet.wait(60)
        parts = list(self.parts)
        self.meet.wait(60)
        return parts

    def all_reduce(self, t): return t.copy_(sum(self.exchange(t)))
    def all_gather(self, t, dim=-1): return torch.cat(self.exchange(t), dim)

    def barrier(self): self.meet.wait(60)
    def broadcast(self, t): return t.copy_(self.exchange(t)[0])

    def min_max(self, value):
        values = [int(v) for v in self.exchange(torch.tensor(value))]
        return min(values), max(values)


def thread_ranks(fn, size):
    "What `fn(rank's group)` returns on each of `size` ranks"
    barrier, parts, results = threading.Barrier(size), [None] * size, [None] * size
    def run(rank):
        try: results[rank] = fn(ThreadRank(rank, size, barrier, parts))
        except BaseException: barrier.abort(); raise
    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for t in threads: t.start()
    for t in threads: t.join()
    return results


SHARED = dict(vocab_size=96, num_attention_heads=16, num_key_value_heads=4, head_dim=8, intermediate_size=64, moe_intermediate_size=16)

@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("change", [family("qwen2"), family("qwen3", tie_word_embeddings=False), family("qwen3_moe", num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0])], ids=lambda c: c["model_type"])
def test_more_ranks_than_kv_heads(tmp_path, change, size):  # F34
    path, ids = save_random_model(tmp_path, {**TINY, **change, **SHARED}, seed=2), prompts(6, 1, 11, 3)
    with torch.inference_mode(): want = load(path, torch.float32)(full_context(ids))
    def rank(group):
        model = load(path, torch.float32, tp=group)
        with torch.inference_mode(): return model(full_context(ids)), model.layers[0].attention, model.layers[0].attention.qkv.slots("a")["a.k_proj.weight"].src[0]
    for r, (got, attention, rows) in enumerate(thread_ranks(rank, size)):
        assert (got - want).abs().max() < 1e-4 * max(1, want.abs().max()) and torch.equal(got.argmax(-1), want.argmax(-1))
        assert attention.heads == (16 // size, max(1, 4 // size), max(1, 4 // size))
        assert rows == slice(4 * r // size * 8, 4 * r // size * 8 + max(1, 4 // size) * 8)


def test_engines_that_share_kv_heads_write_what_one_writes(tmp_path):  # F34
    from minisgl_edu.core import SamplingParams
    from minisgl_edu.engine import Engine, EngineConfig, StaticBatch
    path = save_random_model(tmp_path, {**TINY, **family("qwen3"), **SHARED}, seed=4)
    def rank(group):
        engine = Engine(EngineConfig(path, device="cpu", dtype="float64", num_pages=64, page_size=4), group)
        try: return StaticBatch(engine, [(i, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)) for i in prompts(5, 17)]).run(), engine.pool.k[0].shape[1]
        finally: engine.close()
    want, heads = rank(TPGroup())
    assert heads == 4 and thread_ranks(rank, 8) == [(want, 1)] * 8


def test_kv_heads_and_their_bytes_by_rank():  # F34
    from minisgl_edu.device import kv_bytes_per_token, kv_heads_of, step_costs
    config = ModelConfig.from_dict({**TINY, **SHARED, "architectures": ["LlamaForCausalLM"]})
    assert [list(kv_heads_of(4, 8, r)) for r in range(8)] == [[h] for h in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert [kv_bytes_per_token(config, torch.float32, tp) for tp in (1, 2, 4, 8)] == [2 * 3 * n * 8 * 4 for n in (4, 2, 1, 1)]
    assert {c.name: c.bytes for c in step_costs(config, [(0, 1)], torch.float32, 8)}["qkv"] == 3 * 4 * (48 * 32 + 48 + 32)
    for heads, size in ((4, 3), (3, 2), (4, 6)):
        with pytest.raises(ValueError, match=rf"{heads}.*{size}"): kv_heads_of(heads, size)


@pytest.mark.parametrize("heads, size, message", [(16, 3, "query heads = 16 .* 3 ranks"), (12, 3, "KV heads = 4 .* 3 ranks"), (24, 6, "KV heads = 4 .* 6 ranks")])
def test_three_ranks_cannot_share_four_kv_heads(heads, size, message):  # F34
    config = ModelConfig.from_dict({**TINY, **SHARED, "architectures": ["LlamaForCausalLM"], "num_attention_heads": heads})
    with pytest.raises(ValueError, match=message): create_model(config, TorchOps(), tp=TPGroup(0, size))


@pytest.mark.parametrize("variant", ["mistral", "qwen2 untied", "qwen3", "linear", "llama3 rope", "qwen3 yarn", "moe, untied, yarn", "moe, every second layer"])
def test_the_engine_writes_what_transformers_writes(tiny, variant):
    from minisgl_edu import LLM, SamplingParams
    hf, ids = load_hf(tiny(variant), torch.float64), prompts(9, 40, 70, seed=3)
    with LLM(tiny(variant), device="cpu", dtype="float64", page_size=4, max_prefill_length=16) as llm: # in chunks, beyond the original context
        got = [o.token_ids for o in llm.generate(ids, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))]
    for i, tokens in zip(ids, got):
        want = hf.generate(torch.tensor([i]), attention_mask=torch.ones(1, len(i), dtype=torch.int64), do_sample=False, max_new_tokens=12, eos_token_id=None)
        assert tokens == want[0, len(i):].tolist()


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_random_weights_of_any_family_need_a_config_only(tmp_path, model_type):
    from minisgl_edu import LLM, SamplingParams
    from minisgl_edu.device import weight_bytes
    path = save_random_model(tmp_path, {**TINY, **family(model_type), **SPARSE, "sliding_window": None})
    (path/"model.safetensors").unlink()
    with LLM(path, device="cpu", dummy_weights=True) as llm:
        assert len(llm.generate([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0].token_ids) == 4
        assert sum(p.nbytes for p in llm.engine.model.parameters()) == weight_bytes(llm.engine.model_config, torch.float32)


@pytest.mark.parametrize("variant", ["moe, every second layer", "moe, shares as they are"])
def test_costs_of_experts_are_those_of_the_model(tiny, variant):
    from minisgl_edu.device import step_costs
    config = ModelConfig.from_dir(tiny(variant))
    costs = {c.name: c for c in step_costs(config, [(0, 1)], torch.float32)}
    layers, k, one = len(config.sparse_layers), config.experts_per_token, 2 * 24 * 48
    assert costs["experts gate_up"].flops == 2 * layers * k * one and costs["gate_up"].flops == 2 * (3 - layers) * 2 * 80 * 48
    assert costs["experts gate_up"].bytes == pytest.approx(4 * layers * k * (one + 48 + 48), rel=1e-9)  # one token touches exactly k experts
    many = {c.name: c for c in step_costs(config, [(0, 1000)], torch.float32)}
    weights = many["experts gate_up"].bytes - 4 * layers * 1000 * k * (48 + 48)
    assert weights == pytest.approx(4 * layers * 8 * one, rel=1e-6)                                    # a thousand touch them all


def test_a_graph_holds_a_model_unless_its_experts_need_the_host(tiny, monkeypatch):
    from minisgl_edu import models
    dense, sparse = (create_model(ModelConfig.from_dir(tiny(v)), TorchOps()) for v in ("qwen3", "moe"))
    assert dense.capturable and not sparse.capturable
    monkeypatch.setattr(models, "can_group", lambda device, dtype: True)
    assert sparse.capturable


@torch.inference_mode()
def test_kernels_compute_what_the_family_asks(tiny):
    from minisgl_edu.kernels import TritonOps
    for variant in ("qwen3 yarn", "moe, every second layer"):
        ids = prompts(3, 1)
        got = load(tiny(variant), torch.float32, TritonOps())(full_context(ids))
        want = load(tiny(variant), torch.float32)(full_context(ids))
        assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_an_impossible_split_is_refused_with_both_numbers(tiny):  # F34
    with pytest.raises(ValueError, match=r"12.*5"): create_model(ModelConfig.from_dir(tiny()), TorchOps(), tp=TPGroup(0, 5))


def attend(q, k, v, lens):
    ctx = full_context([[0] * n for n in lens])
    backend = DenseAttention()
    backend.prepare(ctx)
    return backend.forward(q, k, v, 0, ctx)


def test_query_heads_read_their_kv_head():  # F31
    v = torch.arange(2.0)[None, :, None].expand(3, 2, 8).contiguous()
    out = attend(torch.randn(3, 12, 8), torch.randn(3, 2, 8), v, [3])
    assert torch.allclose(out[:, :6], torch.zeros(())) and torch.allclose(out[:, 6:], torch.ones(()))


@pytest.mark.parametrize("ratio", [1, 4, 7, 8])
def test_dense_attention_equals_a_plain_reference(ratio):  # F31
    lens, kv, gen = [1, 6, 3], 2, torch.Generator().manual_seed(ratio)
    q, k, v = (torch.randn(sum(lens), h, 16, generator=gen) for h in (kv * ratio, kv, kv))
    out, start = attend(q, k, v, lens), 0
    assert out.shape == q.shape
    for n in lens:
        for t in range(n):
            for h in range(kv * ratio):
                seen = slice(start, start + t + 1)
                weights = torch.softmax(k[seen, h // ratio] @ q[start + t, h] / 4, 0)
                assert (out[start + t, h] - weights @ v[seen, h // ratio]).abs().max() < 1e-5
        start += n


def test_dense_attention_keeps_no_kv():
    assert isinstance(DenseAttention(), AttentionBackend)
    one = torch.zeros(1, dtype=torch.int64)
    ctx = ForwardContext("decode", [4], [5], one, one, one + 4, one, one)
    with pytest.raises(ValueError, match="cached_lens"): DenseAttention().forward(*[torch.zeros(1, 1, 8)] * 3, 0, ctx)


def test_models_are_made_without_memory_and_unknown_ones_refused(tiny):
    config = ModelConfig.from_dir(tiny())
    model = create_model(config, TorchOps())
    assert all(p.is_meta for p in model.parameters()) and model.attention is None
    from dataclasses import replace
    with pytest.raises(ValueError, match="BertForMaskedLM"): create_model(replace(config, architecture="BertForMaskedLM"), TorchOps())


def test_loading_names_what_is_missing_or_too_much(tiny, tmp_path):
    from safetensors.torch import load_file, save_file
    import shutil
    for change, word in ((lambda s: s.pop("model.layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj"), (lambda s: s.update({"model.extra.weight": torch.ones(2)}), "model.extra")):
        path = tmp_path/word
        shutil.copytree(tiny("untied"), path)
        state = load_file(path/"model.safetensors")
        change(state)
        save_file(state, path/"model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=word): load(path, torch.float32)


def assert_same_tokens(got, logits_of, prompt, want):
    "DESIGN's rule: equal, or the oracle's own best two scores within 1e-5 relative at the first difference"
    for i, (a, b) in enumerate(zip(got, want)):
        if a != b:
            top = logits_of(prompt + want[:i]).topk(2).values
            assert (top[0] - top[1]).abs() <= 1e-5 * top[0].abs(), (i, a, b, top)
            return
    assert len(got) == len(want)


@torch.inference_mode()
def test_default_model_writes_what_transformers_writes():
    from transformers import AutoTokenizer
    path = default_model()
    model, hf, tok = load(path, torch.float32), load_hf(path, torch.float32), AutoTokenizer.from_pretrained(path)
    for e in EXAMPLES:
        ids = tok.apply_chat_template([dict(role="user", content=e.prompt)], add_generation_prompt=True, return_dict=False) if e.chat else tok.encode(e.prompt)
        want = hf.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=5)[0, len(ids):].tolist()
        got = generate_naive(model, ids, 5, model.config.eos_token_ids)
        assert_same_tokens(got, lambda seen: hf(torch.tensor([seen])).logits[0, -1], ids, want)
