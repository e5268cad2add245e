"The decoder and its dense attention against transformers: the oracle has an oracle too"
import pytest
import torch

from minisgl_edu.checkpoint import ModelConfig, default_model, load_weights, save_random_model
from minisgl_edu.core import EXAMPLES, AttentionBackend, ForwardContext
from minisgl_edu.distributed import run_ranks
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


def prompts(*lens, vocab=96, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=gen).tolist() for n in lens]


def load(path, dtype, ops=None, attention=None, **kwargs):
    model = create_model(ModelConfig.from_dir(path), ops or TorchOps(), attention or DenseAttention(), **kwargs)
    load_weights(model, path, "cpu", dtype)
    return model


def load_hf(path, dtype):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


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
    assert got.shape == (4, 96) and got.dtype == torch.float32
    assert ((got - want).abs().max() / want.abs().max()).item() < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
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


def test_an_impossible_split_is_refused_with_both_numbers(tiny):  # F34
    from minisgl_edu.distributed import TPGroup
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
