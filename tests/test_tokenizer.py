"""tokenizer.py: ids, chats, fingerprints, and where a tokenizer comes from."""

import base64
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

import tokenizer
from tokenizer import LLAMA3_PATTERN, Tokenizer, load_tokenizer

ROOT = Path(tokenizer.__file__).parent
END = "<|endoftext|>"
MESSAGES = [{"role": "user", "content": "Copy it:\n01"}, {"role": "assistant", "content": "01"}]


def encoding(pattern=r"[\s\S]", specials=None, name="mine", merges=()) -> tiktoken.Encoding:
    ranks = {bytes([i]): i for i in range(256)} | {merge: 256 + i for i, merge in enumerate(merges)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials or {END: 300})


def test_bytes():
    ours = load_tokenizer("bytes")
    text = "a\n\né<|endoftext|>"  # a special token's spelling is ordinary text
    ids = ours.encode(text)
    assert ids.dtype == np.uint32 and ids.tolist() == list(text.encode())
    assert ours.decode(ids) == text and len(ours.encode("")) == 0
    assert (ours.name, ours.vocab_size, ours.eos, ours.im_end) == ("bytes", 257, 256, None)
    assert ours.token_bytes == [bytes([i]) for i in range(256)] + [b""]
    assert ours.decode([97, 10, 256]) == "a\n<|endoftext|>"
    assert ours.decode([0xC3]) == "\ufffd" and ours.decode_bytes([0xC3]) == b"\xc3"
    assert ours.encode("a\ud800b").tolist() == list("a\ufffdb".encode())  # half a surrogate pair
    assert ours.decode([257, 97]) == "\ufffda"  # an id that only pads a vocabulary
    sha256 = "3f1e680ae214f6d68ce3c1f796e9c2a12e8c15a10fe0563ceac196c93c439326"
    assert ours.fingerprint == {"size": 257, "sha256": sha256}  # as it was: shards and checkpoints hold it


def test_the_fingerprint_is_of_all_that_is_computed_and_of_no_name():
    two = {END: 300, "<|x|>": 299}
    variants = [
        Tokenizer(encoding(), END),
        Tokenizer(encoding(pattern=r"\s|\S"), END),
        Tokenizer(encoding(specials={END: 301}), END),
        Tokenizer(encoding(specials=two), END),
        Tokenizer(encoding(specials=two), "<|x|>"),
        Tokenizer(encoding(merges=[b"ab"]), END),
        Tokenizer(encoding(merges=[b"ba"]), END),
    ]
    assert len({ours.fingerprint["sha256"] for ours in variants}) == len(variants)
    renamed = Tokenizer(encoding(name="x"), END)
    assert renamed.fingerprint == variants[0].fingerprint and renamed.name == "x"


def test_line_breaks_of_special_tokens_count_but_not_their_bytes():
    ours = Tokenizer(encoding(specials={END: 300, "<a>\n\nb\n": 258, "<b>": 259}), END)
    assert ours.token_bytes[257:] == [b"", b"\n\n\n", b""] + [b""] * 41  # 257 and most others are no tokens
    assert ours.decode([258]) == "<a>\n\nb\n"


@pytest.mark.parametrize(
    "text", ["a" * 300, " " * 300, "\n" * 300, "ab cd\n" * 60, "ab  \n\n  cd, " * 30, "x\n" + "é" * 250]
)
def test_long_texts_are_cut_where_no_token_is(monkeypatch, text):
    merges = [b"ab", b" c", b" cd", b"\n\n", b"  ", b"aa", b"aaaa", b",  ", b" \n\n"]
    ours = Tokenizer(encoding(LLAMA3_PATTERN, merges=merges), END)
    whole = ours.encode(text)
    monkeypatch.setattr(tokenizer, "PIECE", 50)
    monkeypatch.setattr(tokenizer, "PIECES", re.compile(tokenizer.PIECES.pattern.replace("100000", "50")))
    pieces = tokenizer.PIECES.findall(text)
    assert "".join(pieces) == text and max(map(len, pieces)) <= 50 and len(pieces) > 1
    assert ours.decode(ours.encode(text)) == text
    if len(set(text)) > 2:  # there are places to cut at
        assert ours.encode(text).tolist() == whole.tolist()


@pytest.mark.parametrize("text", ["a" * 1_000_000, " \t" * 500_000])
def test_a_million_characters_without_a_place_to_cut(text):  # tiktoken alone panics on the second
    ours = Tokenizer(encoding(LLAMA3_PATTERN, merges=[b"aa"]), END)
    assert ours.decode_bytes(ours.encode(text)) == text.encode()


def test_a_tiktoken_encoding_by_name(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding(name=name))
    ours = load_tokenizer.__wrapped__("gpt2")  # without its cache
    assert (ours.name, ours.eos) == ("gpt2", 300)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {}["no network"])
    with pytest.raises(RuntimeError, match="tokenizer='gpt2': .*TIKTOKEN_CACHE_DIR.*no network"):
        load_tokenizer.__wrapped__("gpt2")


@pytest.mark.parametrize("content, message", [
    (b"IQ== 0\nIg== 1\n", "2 ranks, expected Llama-3's, which are 0 to 127,999"),
    (b'{"model": {}}', "expected lines of base64 and rank.*for a tokenizer.json, give its folder"),
])  # fmt: skip
def test_a_file_that_is_not_llama_3s(tmp_path, content, message):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=f"tokenizer.model: {message}"):
        load_tokenizer(str(tmp_path / "tokenizer.model"))


def test_unknown_names(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])  # of llama-models
    for name in ("lama3", "llama3"):
        expected = f"tokenizer='{name}': expected llama3 .*pip install --no-deps llama-models.*tokenizer.model.*cl100k"
        with pytest.raises(FileNotFoundError, match=expected):
            load_tokenizer.__wrapped__(name)


def test_llama3s_special_tokens_and_where_its_file_is_found(tmp_path, monkeypatch):  # other tokens, the same numbers
    tokens = [bytes([i]) for i in range(256)] + [i.to_bytes(3) for i in range(256, 128_000)]
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(tokens)))
    file = SimpleNamespace(parts=("llama_models", "llama3", "tokenizer.model"), locate=lambda: path)
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [SimpleNamespace(parts=("a", "b")), file])
    ours = load_tokenizer.__wrapped__("llama3")
    assert (ours.name, ours.vocab_size, ours.eos, ours.im_end) == ("llama3", 128_256, 128_001, None)
    assert ours.token_bytes == tokens + [b""] * 256
    assert ours.decode([128_000, 128_009]) == "<|begin_of_text|><|eot_id|>"
    assert ours.decode([128_255]) == "<|reserved_special_token_245|>"


def test_llama3():
    try:
        ours = load_tokenizer("llama3")
    except FileNotFoundError:
        pytest.skip("could not find Llama-3's tokenizer: pip install --no-deps llama-models")
    breaks = [token.count(b"\n") for token in ours.token_bytes if b"\n" in token]
    assert len(breaks) == 2255 and sum(count > 1 for count in breaks) == 735
    assert ours.encode("\n").tolist() == [198] and ours.encode("Hello world").tolist() == [9906, 1917]


def test_tiktoken_is_asked_for_where_a_tokenizer_is_loaded_and_nowhere_else(tmp_path):
    (tmp_path / "tokenizer.py").write_bytes((ROOT / "tokenizer.py").read_bytes())
    code = "import sys; sys.modules['tiktoken'] = None; from tokenizer import load_tokenizer; print('here')\n"
    code += "try: load_tokenizer('bytes')\nexcept RuntimeError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "here\ntokenizer='bytes' needs tiktoken: pip install tiktoken\n", done.stderr


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with a byte-level BPE and ChatML's special tokens, as Qwen3's."""
    theirs = tokenizers.Tokenizer(models.BPE())
    split = tokenizers.Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(split, "isolated"), byte_level])
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[], initial_alphabet=letters, show_progress=False)
    theirs.train_from_iterator([(ROOT / "tokenizer.py").read_text()], trainer)
    theirs.add_special_tokens([END, "<|im_start|>", "<|im_end|>"])
    (tmp_path / "qwen").mkdir()
    theirs.save(str(tmp_path / "qwen" / "tokenizer.json"))
    return tmp_path / "qwen"


@pytest.mark.parametrize(
    "text", ["Copy this:\n0110", "über\n\n  naïve\t日本 it's 3.14!!\n", "", " a b a", "<|im_end|>"[:-1]]
)
def test_a_tokenizer_json_gives_the_ids_of_hugging_face(folder, text):
    ours, theirs = load_tokenizer(str(folder)), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ours.encode(text).tolist() == theirs.encode(text).ids and ours.decode(ours.encode(text)) == text
    assert (ours.eos, ours.im_end) == (theirs.token_to_id(END), theirs.token_to_id("<|im_end|>"))
    assert ours.token_bytes[ours.encode("\n")[0]] == b"\n" and ours.vocab_size == theirs.get_vocab_size()


def test_equal_files_have_one_fingerprint_whatever_their_folder_is_called(folder, tmp_path):
    (tmp_path / "twin").mkdir()
    facts = json.loads((folder / "tokenizer.json").read_text())
    (tmp_path / "twin" / "tokenizer.json").write_text(json.dumps(facts, indent=7))
    ours, twin = load_tokenizer(str(folder)), load_tokenizer(str(tmp_path / "twin"))
    assert (ours.name, twin.name) == ("qwen", "twin") and ours.fingerprint == twin.fingerprint


@pytest.mark.parametrize("change, message", [
    (lambda facts: facts.pop("added_tokens"), "expected byte-level BPE"),
    (lambda facts: facts["model"].update(vocab=[["a", 0.0]]), "expected byte-level BPE"),
    (lambda facts: facts["model"].update(vocab={"▁a": 0}, merges=[]), "expected byte-level BPE.*▁"),
    (lambda facts: facts.update(pre_tokenizer=None), "expected byte-level BPE"),
    (lambda facts: facts["pre_tokenizer"]["pretokenizers"].pop(0), "0 regular expressions"),
    (lambda facts: facts["pre_tokenizer"]["pretokenizers"].extend(facts["pre_tokenizer"]["pretokenizers"]), "2 reg"),
    (lambda facts: facts["added_tokens"].pop(0), r"neither <\|endoftext\|> nor <\|end_of_text\|> among added_tokens"),
    (lambda facts: facts["model"]["merges"].reverse(), "merges are not in the order of their ids"),
])  # fmt: skip
def test_a_tokenizer_json_of_another_kind_is_refused(folder, change, message):
    facts = json.loads((folder / "tokenizer.json").read_text())
    change(facts)
    (folder / "tokenizer.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=f"qwen/tokenizer.json: {message}"):
        load_tokenizer(str(folder))


def test_a_tokenizer_json_that_is_damaged_or_missing(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(RuntimeError, match="qwen/tokenizer.json: damaged, expected JSON: fetch it again"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="qwen/tokenizer.json: no such file: copy the model's there"):
        load_tokenizer(str(folder))


def test_a_chat_of_bytes_is_paragraphs_and_the_answer_ends_with_an_end_of_sequence():
    ids, loss_mask = load_tokenizer("bytes").chat(MESSAGES)
    assert ids.dtype == np.int64 and ids.tolist() == [*b"Copy it:\n01\n\n01", 256]
    assert loss_mask.dtype == bool and loss_mask.tolist() == [False] * 13 + [True] * 3
    twice, loss_mask = load_tokenizer("bytes").chat(MESSAGES * 2)
    assert twice.tolist() == ids.tolist() * 2 and loss_mask.sum() == 6


def test_a_chat_of_qwen3_is_chatml(folder):
    ours = load_tokenizer(str(folder))
    ids, loss_mask = ours.chat(MESSAGES)
    assert ours.decode(ids) == "<|im_start|>user\nCopy it:\n01<|im_end|>\n<|im_start|>assistant\n01<|im_end|>\n"
    assert ours.decode(ids[loss_mask]) == "01<|im_end|>" and (ids == ours.im_end).sum() == 2
