"Text to tokens, tokens to text, stop strings: what chapter 19 promises."
import json, random, re, shutil
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from transformers import AutoTokenizer

from minisgl_edu import text as tx
from minisgl_edu.checkpoint import default_model, save_random_model
from minisgl_edu.core import RequestError
from minisgl_edu.text import (ByteDetokenizer, Detokenizer, StopChecker, TextStream, TokenTable, WindowDetokenizer, byte_alphabet, decode, encode,
                              encode_chat, load_tokenizer, token_table)

TEXTS = ["Hello, world!  Two  spaces\n\n\tand tabs.", "Zażółć gęślą jaźń", "Привет, мир", "Γειά σου Κόσμε", "日本語のテストです。", "你好，世界", "안녕하세요 세계",
         "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก", "ආයුබෝවන්", "🙂🙃", "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪🇫🇷 🏴󠁧󠁢󠁥󠁮󠁧󠁿", "e\u0301 ﷽ \u200d\u200b", "𐍈𝔘𠜎", "real \ufffd and \ufffd\ufffd",
         "mixed: aé中🙂\ufffd 2024"]

@pytest.fixture(scope="module")
def tok(): return load_tokenizer(default_model())

def fallback_tokenizer(decoder=None):
    "A vocabulary in the SentencePiece style: `▁` for a space, byte tokens for what it does not know"
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "\ufffd", *"abcdefgh,.", "中", "▁a", "▁b", "ab", "▁▁", "▁ab"]
    core = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "▁"), ("▁a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoder or decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.add_special_tokens([AddedToken(t, special=True) for t in words[:3]])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")

@pytest.fixture(scope="module")
def spm(): return fallback_tokenizer()

def stream(tokenizer, ids, **kwargs):
    d = Detokenizer(tokenizer, **kwargs)
    return [d.push(i) for i in ids] + [d.finish()]

def byte_ids(tok, data):
    "Tokens that spell exactly these bytes, one each"
    alphabet = {b: c for c, b in byte_alphabet().items()}
    return [tok.convert_tokens_to_ids(alphabet[b]) for b in data]


# --- detokenizing (F19)

@pytest.mark.parametrize("text", TEXTS)
def test_every_script_comes_back_in_pieces(tok, spm, text):
    for t in (tok, spm):
        ids = encode(t, text)
        pieces = stream(t, ids)
        assert "".join(pieces) == decode(t, ids) == text
        assert sum(p.count("\ufffd") for p in pieces) == text.count("\ufffd")

@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_cut_anywhere_equals_its_decode(tok, spm, text):
    for t in (tok, spm):
        ids = encode(t, text)
        for n in range(len(ids) + 1): assert "".join(stream(t, ids[:n])) == decode(t, ids[:n])

def test_byte_alphabet_is_the_tokenizers_own():
    from tokenizers.pre_tokenizers import ByteLevel
    assert set(byte_alphabet()) == set(ByteLevel.alphabet()) and sorted(byte_alphabet().values()) == list(range(256))

def test_random_ids_of_the_default_vocabulary(tok):
    rng, table = random.Random(0), token_table(tok)
    assert table.is_byte_level and isinstance(Detokenizer(tok).inner, ByteDetokenizer)
    odd = [i for i in range(len(tok)) if (b := table.bytes_of(i)) and b.decode("utf-8", "replace").endswith("\ufffd") or not b.isascii()] # parts of characters
    pools = [range(len(tok)), odd, range(17), range(len(tok) - 2, len(tok) + 9)] # the last: ids beyond the vocabulary
    for n in range(1500):
        ids = [rng.choice(rng.choices(pools, (4, 6, 1, 1))[0]) for _ in range(rng.randrange(40))]
        for skip in (True, False): assert "".join(stream(tok, ids, skip_special_tokens=skip)) == decode(tok, ids, skip), ids

def random_fallback_ids(rng, tokenizer):
    ids, known = [], range(3 + 256, len(tokenizer))
    while len(ids) < 30 and rng.random() < 0.93:
        kind = rng.random()
        if kind < 0.4: ids.append(rng.choice(known))
        elif kind < 0.7: ids += [3 + b for b in rng.choice("é中🙂\ufffd").encode()[:rng.randint(1, 4)]]
        elif kind < 0.8: ids.append(3 + rng.randrange(256))
        else: ids.append(rng.randrange(3))
    return ids

def test_random_ids_of_a_byte_fallback_vocabulary():
    from tokenizers import decoders
    rng = random.Random(0)
    for tokenizer in (fallback_tokenizer(), fallback_tokenizer(decoders.Metaspace())):
        assert isinstance(Detokenizer(tokenizer).inner, WindowDetokenizer)
        for n in range(1500):
            ids = random_fallback_ids(rng, tokenizer)
            for skip in (True, False): assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == decode(tokenizer, ids, skip), ids

def test_emoji_is_never_shown_broken(tok):
    ids = encode(tok, "🙂🙃!")
    assert not any("\ufffd" in p for p in stream(tok, ids))
    half = encode(tok, "🙂")[:-1] # ended by the limit inside a character
    pieces = stream(tok, half)
    assert pieces[-1] == "\ufffd" and "".join(pieces) == decode(tok, half)
    assert "".join(stream(tok, encode(tok, "end \ufffd"))) == "end \ufffd"

def test_text_is_not_held_longer_than_needed(tok, spm):
    ids = encode(tok, "plain words come at once")
    assert stream(tok, ids) == [decode(tok, [i]) for i in ids] + [""]
    three = encode(tok, "中") # a real U+FFFD is not held either: its bytes are complete
    assert stream(tok, encode(tok, "\ufffd"))[-1] == "" and stream(tok, three)[-1] == ""
    assert all(stream(spm, encode(spm, "a b ab"))[:-1])

def test_prompt_bytes_do_not_leak(tok):
    "F21: the prompt ends inside a character; the answer begins with the rest of it"
    emoji = encode(tok, "🙂")
    prompt, answer = encode(tok, "Hello world ") + emoji[:2], emoji[2:] + encode(tok, "ok!")
    text = "".join(stream(tok, answer))
    assert text == decode(tok, answer) and "Hello" not in text and prompt

def test_end_of_sequence_is_not_text(tok):
    hi = encode(tok, "Hi")
    for skip in (True, False):
        assert "".join(stream(tok, [*hi, 2], skip_special_tokens=skip, eos_ids=(2,))) == "Hi"
    assert "".join(stream(tok, [*hi, 2, *hi, 2, 2], skip_special_tokens=False, eos_ids=(2,))) == "Hi<|im_end|>Hi<|im_end|>"
    plain = hi[0] # an end token need not be special
    assert "".join(stream(tok, [plain, plain], eos_ids=(plain,))) == "Hi"

def test_where_each_token_begins(tok, spm):
    "Never back; at its own characters if it has any; and before whatever it shows"
    def check(t, ids, skip, eos_ids=()):
        d, shown, starts = Detokenizer(t, skip, eos_ids), "", []
        for i in ids:
            shown += d.push(i)
            starts.append(d.start)
            assert d.start <= len(shown)
        text = shown + d.finish()
        assert starts == sorted(starts)
        for n, (i, at) in enumerate(zip(ids, starts)):
            own = token_table(t).bytes_of(i).decode("utf-8", "replace")
            if (skip and i in token_table(t).special) or "\ufffd" in own or (n == len(ids) - 1 and i in eos_ids) or (t is spm and 3 <= i < 3 + 256): continue
            if i in eos_ids: assert own in text[at:]  # it waits for the next token, and so may something before it
            else: assert text[at:].startswith(own) or (t is spm and own.startswith(" ")), (ids, n)  # the first space of all is no text
    rng = random.Random(0)
    odd = [i for i in range(len(tok)) if not token_table(tok).bytes_of(i).isascii()]
    for _ in range(500):
        skip, ids = rng.random() < 0.5, [rng.choice(rng.choice([range(len(tok)), odd, range(17)])) for _ in range(rng.randrange(30))]
        check(tok, ids, skip, rng.choice([(), (2,), range(0, 40000, 3)]))
        check(spm, random_fallback_ids(rng, spm), skip, rng.choice([(), (2,)]))

def test_where_tokens_without_text_begin(tok, spm):
    def starts(t, ids, **kw):
        d = Detokenizer(t, **kw)
        return [(d.push(i), d.start)[1] for i in ids]
    hi, emoji = encode(tok, "Hi"), byte_ids(tok, "🙂".encode())
    assert starts(tok, [*hi, *emoji, *hi, *emoji[:2], *hi]) == [0, 2, 2, 2, 2, 3, 5, 5, 6]  # a half that stays one is a character too: U+FFFD
    assert starts(tok, [*hi, 1, 2, *hi]) == [0, 2, 2, 2] and starts(tok, [*hi, 1, *hi], skip_special_tokens=False) == [0, 2, 2 + len(tok.decode([1]))]
    for skip, end in ((True, 2), (False, 2 + len(tok.decode([2])))): assert starts(tok, [*hi, 2, *hi], skip_special_tokens=skip, eos_ids=(2,)) == [0, 2, end]  # an ignored end token
    bytes_then_a = [*spm.convert_tokens_to_ids([f"<0x{b:02X}>" for b in "🙂".encode()]), spm.convert_tokens_to_ids("a")]
    assert starts(spm, bytes_then_a) == [0, 0, 0, 0, 1]

def test_added_tokens_with_any_characters(tok):
    from tokenizers import AddedToken
    from transformers import AutoTokenizer
    t = AutoTokenizer.from_pretrained(default_model())
    t.add_tokens([AddedToken("<a b>"), AddedToken("<é>"), AddedToken("<中>", special=True)])
    ids = [*encode(t, "🙂"), *range(len(t) - 3, len(t)), *encode(t, "x")]
    for skip in (True, False): assert "".join(stream(t, ids, skip_special_tokens=skip)) == decode(t, ids, skip)

class Counting:
    "A tokenizer that counts the ids it is given to decode"
    def __init__(self, tokenizer): self.tokenizer, self.count = tokenizer, 0
    def __getattr__(self, name): return getattr(self.tokenizer, name)
    def decode(self, ids, **kwargs): self.count += len(ids); return self.tokenizer.decode(ids, **kwargs)

@pytest.mark.parametrize("make", [
    lambda spm: encode(spm, "a b c " * 200), lambda spm: [spm.convert_tokens_to_ids("\ufffd")] * 1000, lambda spm: [3 + 0x80] * 1000,
    lambda spm: [3 + b for b in "🙂中".encode() * 100] + encode(spm, "a"), lambda spm: [1, 2] * 500 + encode(spm, "a"),
    lambda spm: encode(spm, "a中\ufffdb🙂" * 200)])
def test_cost_does_not_grow_with_the_answer(spm, make):
    ids = make(spm)
    for skip in (True, False):
        counting = Counting(spm)
        d = Detokenizer(counting, skip)
        out = "".join([d.push(i) for i in ids] + [d.finish()])
        assert out == decode(spm, ids, skip) and counting.count <= 50 * len(ids) # re-decoding everything is 250 a token or more

def test_byte_level_never_decodes(tok):
    counting = Counting(tok)
    d = Detokenizer(counting)
    ids = encode(tok, TEXTS[-1] * 20)
    assert "".join([d.push(i) for i in ids] + [d.finish()]) == TEXTS[-1] * 20 and counting.count == 0

def test_window_reads_byte_level_vocabularies_too(tok):
    "For decoders we do not know: text that ends in U+FFFD waits, and never for more than 16 tokens"
    for text in TEXTS:
        d = WindowDetokenizer(TokenTable(tok)); ids = encode(tok, text)
        assert "".join([d.push(i) for i in ids] + [d.finish()]) == text
    d = WindowDetokenizer(TokenTable(tok))
    for i in byte_ids(tok, b"\x80" * 100): d.push(i)
    assert len(d.held) < WindowDetokenizer.MAX_HELD


# --- stop strings (F20)

def run_stops(stops, pieces):
    c = StopChecker(stops)
    sent = [c.push(p) for p in pieces]
    return [t for t, _ in sent], any(s for _, s in sent), c.finish()

def test_stop_strings_as_reported():
    assert run_stops(["own fox"], ["The quick br", "own", " fox jumps"]) == (["The quick br", "", ""], True, "")
    assert run_stops(["\nUser:"], ["Hi", "\nUser", ":"]) == (["Hi", "", ""], True, "")
    assert run_stops(["abc"], ["x", "ab"]) == (["x", ""], False, "ab")
    assert run_stops(["abc"], ["xy ", "abd"]) == (["xy ", "abd"], False, "")
    assert run_stops([], ["anything"]) == (["anything"], False, "")

def cut_reference(stops, text):
    "Character by character: the answer ends where the first stop string is complete"
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits: return text[:end - max(map(len, hits))], True
    return text, False

@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.lists(st.text("abc", min_size=1, max_size=4), max_size=4), st.lists(st.text("abc", max_size=5), max_size=12))
def test_stop_strings_do_not_depend_on_the_pieces(stops, pieces):
    sent, stopped, rest = run_stops(stops, pieces)
    want = cut_reference(stops, "".join(pieces))
    assert ("".join(sent) + rest, stopped) == want
    if not stopped: # and nothing is held that cannot begin a stop string
        assert rest == "" or any(s.startswith(rest) for s in stops)
        seen = out_so_far = ""
        for piece, out in zip(pieces, sent): # after each piece, all but the longest possible beginning is out
            seen += piece
            longest = max((n for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])), default=0)
            out_so_far += out
            assert out_so_far == seen[:len(seen) - longest]

def test_nothing_follows_a_stop():
    c = StopChecker(["x"])
    assert [c.push("ax"), c.push("b"), c.finish()] == [("a", True), ("", True), ""]

def test_text_stream(tok):
    def run(text, finished="stop", stop=(), tail=(2,)):
        ids = [*encode(tok, text), *tail]
        s = TextStream(tok, stop, skip_special_tokens=False, eos_ids=(2,))
        out = [s.push(i, finished if n == len(ids) - 1 else False) for n, i in enumerate(ids)]
        return "".join(t for t, _ in out), out[-1][1]
    assert run("One 🙂 two") == ("One 🙂 two", False)
    assert run("One 🙂 two", stop=["two"]) == ("One 🙂 ", True)
    assert run("One tw", stop=["two"]) == ("One tw", False)
    assert run("One", "length") == ("One<|im_end|>", False)  # ignored, and the limit came
    assert run("One", True) == ("One", False)
    half = encode(tok, "🙂")[:-1]
    s = TextStream(tok, ["\ufffd"])
    assert [s.push(i) for i in half] == [("", False)] * len(half) and s.push(None, "abort") == ("", True) # a stop string in what was held
    s = TextStream(tok)
    for i in half: s.push(i)
    assert s.push(None, "abort") == ("\ufffd", False)


# --- encoding

def test_three_forms_of_a_prompt(tok):
    import numpy as np
    assert encode(tok, "Hi there") == tok.encode("Hi there") and encode(None, (1, np.int64(2))) == [1, 2] and encode(tok, []) == []
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]},
            {"role": "assistant", "content": "Hello", "refusal": None}, {"role": "user", "content": ""}]
    assert decode(tok, encode(tok, chat), False) == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")
    assert encode(tok, chat) == encode_chat(tok, chat)

@pytest.mark.parametrize("prompt, param, message", [
    (None, "prompt", "must be a string"), (5, "prompt", "must be a string"), ("\ud800", "prompt", "lone surrogate at position 0"), ([1, True], "prompt", "True"),
    ([1.0], "prompt", "1.0"), (["a"], "prompt", "'a'"), ([{}], "messages", r"messages\[0\].role must be one of developer, system, user, assistant, tool, got None"),
    ([{"role": "user", "content": "a"}, {"role": "boss", "content": "a"}], "messages", r"messages\[1\].role .* 'boss'"),
    ([{"role": "user"}], "messages", "content must be a string"), ([{"role": "user", "content": 3}], "messages", "a list of text parts, got 3"),
    ([{"role": "user", "content": "\udfff"}], "messages", "surrogate"), ([{"role": "user", "content": [{"type": "image_url"}]}], "messages", "type text"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages", "must be a string"), ([{"role": "user", "content": "a", "name": "x"}], "messages", "name is not supported"),
    ([1, {}], "messages", r"messages\[0\] must be an object"), ([{"role": ["user"], "content": "a"}], "messages", "role must be one of")])
def test_bad_prompts_name_the_field(tok, prompt, param, message):
    with pytest.raises(RequestError, match=message) as e: encode(tok, prompt)
    assert e.value.param == param

def test_roles_as_the_template_allows(tok):
    def laid_out(*messages): return decode(tok, encode(tok, list(messages)), False)
    ask = {"role": "user", "content": "Hi"}
    assert laid_out({"role": "developer", "content": "Be brief."}, ask) == laid_out({"role": "system", "content": "Be brief."}, ask)
    assert "<|im_start|>tool\n42<|im_end|>" in laid_out(ask, {"role": "assistant", "content": None}, {"role": "tool", "content": "42", "tool_call_id": "a"})
    assert encode(tok, [ask]) == list(tok.apply_chat_template([ask], add_generation_prompt=True, return_dict=False))
    narrow = fallback_tokenizer(); narrow.chat_template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.name }}: {{ m.content }}{% endif %}{% endfor %}"
    assert "Ann" in narrow.decode(encode(narrow, [{"role": "user", "content": "Hi", "name": "Ann"}]))
    for role in ("system", "developer", "tool"):
        with pytest.raises(RequestError, match=f"no place for the role '{role}'"): encode(narrow, [{"role": role, "content": "Be brief."}, ask])

def test_chat_needs_messages_and_a_template(tok, spm):
    for bad in ([], None, "Hi", {}):
        with pytest.raises(RequestError, match="non-empty list"): encode_chat(tok, bad)
    with pytest.raises(RequestError, match="no chat template"): encode(spm, [{"role": "user", "content": "Hi"}])
    strict = fallback_tokenizer(); strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate") as e: encode(strict, [{"role": "user", "content": "Hi"}])
    assert e.value.param == "messages"
    with pytest.raises(RequestError, match="no tokenizer"): encode(None, "Hi")

def test_load_tokenizer(tmp_path, tok, caplog):
    with pytest.raises(FileNotFoundError, match="no tokenizer files"): load_tokenizer(tmp_path)
    (tmp_path/"tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))) as e: load_tokenizer(tmp_path)
    assert "cannot be loaded" in str(e.value)
    assert len(encode(tok, "word " * 9000)) > 8192 and "longer than" not in caplog.text


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "LlamaTokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer", "NoSuchTokenizer", None])
def test_the_tokenizer_is_the_one_that_transformers_takes(tmp_path, model_type, name):
    "Asked with a config of no class, `AutoTokenizer` must choose as it does by itself"
    for f in Path(default_model()).iterdir():
        if f.suffix != ".safetensors": shutil.copy(f, tmp_path)
    def change(file, **new):
        old = json.loads((tmp_path/file).read_text(encoding="utf-8")) | new
        (tmp_path/file).write_text(json.dumps({k: v for k, v in old.items() if v is not None}), encoding="utf-8")
    change("config.json", model_type=model_type); change("tokenizer_config.json", tokenizer_class=name)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    text, chat = "Hello wörld 12  x 👩‍🚀", [{"role": "user", "content": "Hi"}]
    assert type(ours) is type(theirs) and ours.encode(text) == theirs.encode(text) and ours.all_special_ids == theirs.all_special_ids
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)


def test_every_vocabulary_spells_its_tokens():
    "Joined over the tokens, the bytes are the text; special tokens spell their names"
    for tokenizer, texts in ((load_tokenizer(default_model()), TEXTS), (fallback_tokenizer(), ["ab a", "中 é 🙂 b"])):
        table = token_table(tokenizer)
        for text in texts: assert b"".join(map(table.bytes_of, encode(tokenizer, text))).decode().removeprefix(" " * (not table.is_byte_level)) == text
    assert table.bytes_of(1) == b"<s>" and table.bytes_of(10**6) == b""
