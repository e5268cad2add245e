"""Greedy float32 output equals transformers' `generate` token for token: alone, in a mixed batch, at several page sizes."""
import pytest, torch

from minisgl_edu import LLM, SamplingParams, default_model
from plugins import DecodeFirst, LoopAttention, PageChainCache

NEW_TOKENS = 64
CHAT = [  # through the chat template
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a lighthouse.",
    "¿Cuál es la capital de España y qué se come allí?",
    "Convert 72 degrees Fahrenheit to Celsius and show the steps.",
]
PLAIN = [
    "Once upon a time, in a village by the sea,",
    "The three laws of thermodynamics are",
    "1, 2, 3, 5, 8, 13, 21,",
    "A",
    "   \n\n\t indented, with  odd   white\r\nspace  ",
]
SCRIPTS = [
    "从前有一座山，山上有一座庙，庙里有一个老和尚",
    "吾輩は猫である。名前はまだ無い。どこで生れたか",
    "كان يا ما كان في قديم الزمان",
    "Все счастливые семьи похожи друг на друга, каждая",
    "एक समय की बात है, एक छोटे से गाँव में",
    "Η Αθήνα είναι η πρωτεύουσα",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🎉🎉 party at 8! 🍕",
]
CODE = [
    'def quicksort(xs):\n    """Sort a list."""\n    if len(xs) <= 1:\n',
    '{"name": "Ada", "born": 1815, "tags": ["math", "engines"], "address": {',
    "SELECT name, COUNT(*) FROM users WHERE created_at > '2024-01-01' GROUP BY",
]
LONG = "\n".join(f"Entry {i}: on day {i * 7 % 365} the keeper logged {i * i % 97} ships, wind force {i % 12}, and wrote: all is well."
    for i in range(60)) + "\nSummary of the log above:"


@pytest.fixture(scope="module")
def prompts():
    "Token ids of every prompt, by transformers' own tokenizer"
    from transformers import AutoTokenizer
    tok = AutoTokenizer.from_pretrained(default_model())
    chat = [tok.apply_chat_template([{"role": "user", "content": c}], add_generation_prompt=True, return_dict=False) for c in CHAT]
    ids = chat + [tok(p)["input_ids"] for p in PLAIN + SCRIPTS + CODE + [LONG]]
    assert len(ids) >= 20 and len(ids[-1]) >= 1500, (len(ids), len(ids[-1]))
    return ids


@pytest.fixture(scope="module")
def oracle(prompts):
    "transformers, one prompt at a time: 64 greedy tokens, and the two best logits of every step"
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # always 64 tokens
    out = []
    for ids in prompts:
        got = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
            max_new_tokens=NEW_TOKENS, pad_token_id=0, output_logits=True, return_dict_in_generate=True)
        tokens = got.sequences[0, len(ids):].tolist()
        top2 = [step[0].topk(2).values.tolist() for step in got.logits]
        assert len(tokens) == len(top2) == NEW_TOKENS
        out.append((tokens, top2))
    return out


def differences(got, oracle, what):
    "Lines about requests that leave the oracle's tokens: `ties` where its two best logits agree to 1e-5, `wrong` elsewhere"
    ties, wrong = [], []
    for i, (ours, (tokens, top2)) in enumerate(zip(got, oracle, strict=True)):
        if ours == tokens: continue
        k = next((k for k, (a, b) in enumerate(zip(ours, tokens)) if a != b), min(len(ours), len(tokens)))
        gap = (top2[k][0] - top2[k][1]) / abs(top2[k][0]) if k < len(top2) else float("inf")
        line = f"{what}, prompt {i}, token {k}: ours {ours[k:k + 1]}, oracle {tokens[k:k + 1]}, its top two logits {gap:.1e} apart"
        (ties if gap <= 1e-5 else wrong).append(line)
        print(line)
    return ties, wrong


@pytest.mark.timeout(1800) # three minutes on two idle cores
@pytest.mark.parametrize("page_size", [16, 1, 64])
def test_greedy_equals_transformers(prompts, oracle, page_size):
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(device="cpu", dtype="float32", page_size=page_size) as llm:
        mixed = [o.token_ids for o in llm.generate(prompts, params)]
        chosen = range(len(prompts)) if page_size == 16 else range(0, len(prompts), 5)  # alone, the page size changes little: a sample will do
        alone = [llm.generate(prompts[i], params)[0].token_ids for i in chosen]
        stats = llm.scheduler.stats()
        assert llm.engine.num_pages == stats["pages_free"] + stats["pages_cached"]
    ties, wrong = zip(differences(mixed, oracle, f"mixed, page size {page_size}"), differences(alone, [oracle[i] for i in chosen], f"alone, page size {page_size}"))
    ties, wrong = sum(ties, []), sum(wrong, [])
    assert not wrong, "\n".join(wrong)
    assert len(ties) * 100 <= len(mixed) + len(alone), "\n".join(ties)


@pytest.mark.timeout(1800)
def test_own_parts_answer_like_transformers(prompts, oracle):
    "An attention backend, a prefix cache and a policy of the reader's own: the same tokens, also where the cache has the prompt"
    chosen = range(0, len(prompts) - 1, 5)  # all but the long one, whose loop over tokens would take minutes
    work, params = [prompts[i] for i in chosen], SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS // 4, ignore_eos=True)
    with LLM(device="cpu", dtype="float32", page_size=4, max_seq_len=256, attention_backend=LoopAttention, cache=PageChainCache, policy=DecodeFirst) as llm:
        rounds = [llm.generate(work, params) for _ in range(2)]
    assert all(o.cached_tokens > 0 for o, ids in zip(rounds[1], work) if len(ids) > 4)
    short = [(tokens[:NEW_TOKENS // 4], top2[:NEW_TOKENS // 4]) for tokens, top2 in (oracle[i] for i in chosen)]
    ties, wrong = zip(*(differences([o.token_ids for o in outs], short, "own parts") for outs in rounds))
    assert not sum(wrong, []) and len(sum(ties, [])) <= 1


def test_the_comparison_can_fail(oracle):
    "One changed token is found, and a clear preference is no tie"
    got = [list(tokens) for tokens, _ in oracle]
    assert differences(got, oracle, "same") == ([], [])
    k = max(range(NEW_TOKENS), key=lambda k: oracle[3][1][k][0] - oracle[3][1][k][1])
    got[3][k] += 1
    ties, wrong = differences(got, oracle, "changed")
    assert not ties and len(wrong) == 1 and f"prompt 3, token {k}" in wrong[0]
    got[3] = oracle[3][0][:10]
    assert len(differences(got, oracle, "cut")[1]) == 1
