"""Tokenizers: token ids of texts and of chats, and a fingerprint of what a tokenizer computes.

    tokenizer = load_tokenizer("Qwen3-0.6B")  # or llama3, bytes, gpt2, a path of Llama-3's tokenizer.model
    ids = tokenizer.encode("Hello")  # (N,)
    ids, loss_mask = tokenizer.chat([{"role": "user", "content": "Hello"}])

Needs tiktoken, but only to load one: importing this file does not.
"""

import binascii
import contextlib
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import tiktoken

PIECE = 100_000  # characters: on a run of a million blanks tiktoken overflows its stack
# Pieces end after a line or a word, places that no token crosses; or else anywhere.
PIECES = re.compile(rf"[\s\S]{{1,{PIECE}}}(?:(?<=\n)(?=\S)|(?<=\S)(?= )|\Z)|[\s\S]{{1,{PIECE}}}")

# This and the names are from llama-models' llama3/tokenizer.py.
LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3_PATTERN += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPECIALS = "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id"
LLAMA3_SPECIALS += " step_id start_header_id end_header_id eom_id eot_id python_tag image"
LLAMA3_SPECIALS = LLAMA3_SPECIALS.split() + [f"reserved_special_token_{i}" for i in range(2, 246)]
ENDS = ("<|endoftext|>", "<|end_of_text|>")  # of documents: Qwen3's and GPT-2's, Llama-3's

# Tokenizer.chat as a template. Tokenizer.chat encodes each text apart, which makes a difference only where one begins
# with a line break, and with GPT-2's older pattern where one follows a turn that is not the assistant's.
CHATML = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
CHATML += "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PARAGRAPHS = "{% for message in messages %}{{ message.content }}"
PARAGRAPHS += "{{ eos_token if message.role == 'assistant' else '\n\n' }}{% endfor %}"


class Tokenizer:
    """A tiktoken encoding, and what a corpus and a model need to know of it.

    vocab_size: the largest id + 1
    eos: the id that ends a document; im_end: the id that ends a turn of a chat, None where the vocabulary has no ChatML
    token_bytes: of each id; of a special one only the line breaks, so b"" for nearly all of them; b"" for unused ids
    fingerprint: size, and sha256 of all that decides what is computed; `name` does not, it is for messages
    """

    def __init__(self, encoding: "tiktoken.Encoding", eos: str):
        specials = encoding._special_tokens
        self.encoding = encoding
        self.name = encoding.name
        self.vocab_size = encoding.n_vocab
        self.eos = specials[eos]
        self.im_end = specials.get("<|im_end|>")
        self.token_bytes = [b""] * self.vocab_size
        for token, rank in encoding._mergeable_ranks.items():
            self.token_bytes[rank] = token
        pattern = encoding._pat_str.replace("}+", "}")  # cl100k's \p{N}{1,3}+ cuts the same, and hf.py writes it so
        computes = [pattern, specials, self.eos, [token.hex() for token in self.token_bytes]]
        sha256 = hashlib.sha256(json.dumps(computes, sort_keys=True).encode()).hexdigest()
        self.fingerprint = {"size": self.vocab_size, "sha256": sha256}
        for content, token in specials.items():  # no text, so no bytes; but the rows of 2D-RoPE must count its breaks
            self.token_bytes[token] = b"\n" * content.count("\n")

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Token ids (N,). A special token's spelling is ordinary text; half a surrogate pair becomes U+FFFD."""
        pieces = PIECES.findall(text) if len(text) > PIECE else [text]
        try:
            return np.concatenate([self.encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces])
        except UnicodeEncodeError:
            return self.encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Token ids (N,) of a chat, and its loss mask (N,): what the assistant says, the end of its turn included.

        ChatML where the vocabulary has it (Qwen3). Elsewhere turns are paragraphs, and the assistant's end with eos.
        """
        parts = [(np.empty(0, np.uint32), False)]  # ids, and whether the loss counts them
        for message in messages:
            role, text = message["role"], message["content"]
            own = role == "assistant"
            if self.im_end is not None:
                start = self.encoding.encode_single_token("<|im_start|>")
                parts.append((np.append(start, self.encode(f"{role}\n")), False))
                parts.append((np.append(self.encode(text), self.im_end), own))
                parts.append((self.encode("\n"), False))
            elif own:
                parts.append((np.append(self.encode(text), self.eos), True))
            else:
                parts.append((self.encode(f"{text}\n\n"), False))
        ids = np.concatenate([part for part, _ in parts]).astype(np.int64)
        loss_mask = np.concatenate([np.full(len(part), own) for part, own in parts])
        return ids, loss_mask

    @property
    def chat_template(self) -> str:
        """`chat` in Jinja, as transformers has it."""
        return PARAGRAPHS if self.im_end is None else CHATML

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of tokens, special ones as they are spelled; U+FFFD for an id that only pads a vocabulary."""
        pieces = []
        for i in map(int, ids):
            try:
                pieces.append(self.encoding.decode_single_token_bytes(i))
            except KeyError:
                pieces.append("\ufffd".encode())
        return b"".join(pieces)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, U+FFFD where their bytes are no UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


@lru_cache
def load_tokenizer(name: str) -> Tokenizer:
    """`llama3` (of the installed llama-models), `bytes`, a tiktoken encoding, a path of Llama-3's tokenizer.model, or a
    Hugging Face folder whose tokenizer.json is byte-level BPE.

    FileNotFoundError for a path without a file, ValueError for a file of another kind, RuntimeError for a damaged one,
    and where tiktoken is not installed or cannot fetch its file.
    """
    try:
        import tiktoken
    except ImportError as error:
        raise RuntimeError(f"tokenizer={name!r} needs tiktoken: pip install tiktoken") from error
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        specials = {"<|endoftext|>": 256}
        encoding = tiktoken.Encoding(name, pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=specials)
        return Tokenizer(encoding, "<|endoftext|>")
    if name in tiktoken.list_encoding_names():
        try:
            return Tokenizer(tiktoken.get_encoding(name), "<|endoftext|>")
        except Exception as error:  # of the network, in many forms
            how = "tiktoken fetches its file once: go online, or set TIKTOKEN_CACHE_DIR to a folder with a copy"
            raise RuntimeError(f"tokenizer={name!r}: {how} ({type(error).__name__}: {error})") from error
    path = Path(name)
    if path.is_dir():
        encoding = _byte_level_bpe(path / "tokenizer.json")
        return Tokenizer(encoding, next(end for end in ENDS if end in encoding.special_tokens_set))
    if name == "llama3":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files("llama-models") or ():
                if file.parts[-2:] == ("llama3", "tokenizer.model"):
                    path = Path(file.locate())
    if not path.is_file():
        names = ", ".join(tiktoken.list_encoding_names())
        raise FileNotFoundError(
            f"tokenizer={name!r}: expected llama3 (`pip install --no-deps llama-models` brings its file), a path of "
            f"Llama-3's tokenizer.model, a Hugging Face folder with tokenizer.json, bytes, or one of {names}"
        )
    return Tokenizer(_llama3(path), "<|end_of_text|>")


def _llama3(path: Path) -> "tiktoken.Encoding":
    """The encoding of Llama-3's tokenizer.model: lines of a token's bytes in base64, and its rank."""
    import tiktoken

    try:
        lines = [line.split() for line in path.read_bytes().splitlines()]
        ranks = {binascii.a2b_base64(token): int(rank) for token, rank in lines}
    except ValueError as error:
        expected = "lines of base64 and rank, as in Llama-3's tokenizer.model (for a tokenizer.json, give its folder)"
        raise ValueError(f"{path}: expected {expected}") from error
    if sorted(ranks.values()) != list(range(128_000)):
        raise ValueError(
            f"{path}: {len(ranks):,} ranks, expected Llama-3's, which are 0 to 127,999: fetch it again, or give the "
            "path of Llama-3's"
        )
    specials = {f"<|{special}|>": 128_000 + i for i, special in enumerate(LLAMA3_SPECIALS)}
    return tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=specials)


def gpt2_letters() -> dict[str, int]:
    """The byte that each letter stands for in a byte-level tokenizer.json, GPT-2's table."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that it writes as they are
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_level_bpe(path: Path) -> "tiktoken.Encoding":
    """The encoding of a tokenizer.json, byte-level BPE as Qwen3 has it, but without Unicode normalisation."""
    import tiktoken

    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file: copy the model's there, it is what a folder's tokenizer is")
    try:
        facts = json.loads(path.read_bytes())
    except ValueError as error:
        raise RuntimeError(f"{path}: damaged, expected JSON: fetch it again ({error})") from error
    letters = gpt2_letters()
    try:
        specials = {token["content"]: token["id"] for token in facts["added_tokens"]}
        vocab = {token: i for token, i in facts["model"]["vocab"].items() if token not in specials}
        ranks = {bytes(letters[letter] for letter in token): i for token, i in vocab.items()}
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in facts["model"]["merges"]]
        merged = [vocab[left + right] for left, right in pairs]
        steps = facts["pre_tokenizer"].get("pretokenizers", [facts["pre_tokenizer"]])
        patterns = [step["pattern"]["Regex"] for step in steps if step["type"] == "Split"]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        expected = "byte-level BPE with one Split by a regular expression, as Qwen3 has it"
        raise ValueError(f"{path}: expected {expected} ({type(error).__name__}: {error})") from error
    fault = ""
    if len(patterns) != 1:
        fault = f"{len(patterns)} regular expressions in pre_tokenizer, expected one Split"
    elif not any(end in specials for end in ENDS):
        fault = f"neither {' nor '.join(ENDS)} among added_tokens, with which documents end"
    elif merged != sorted(merged):
        fault = "merges are not in the order of their ids, which tiktoken merges by"
    if fault:
        raise ValueError(f"{path}: {fault}: only tokenizers like Qwen3's can be read")
    name = path.parent.resolve().name
    return tiktoken.Encoding(name, pat_str=patterns[0], mergeable_ranks=ranks, special_tokens=specials)


def tokenizer_json(ours: Tokenizer) -> dict[str, Any]:
    """tokenizer.json of a tokenizer: byte-level BPE, which joins any two tokens that make one, lowest rank first, and
    leaves a word that is one whole. `load_tokenizer` reads it back."""
    ranks, specials = ours.encoding._mergeable_ranks, ours.encoding._special_tokens
    letters = {byte: letter for letter, byte in gpt2_letters().items()}
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.get):
        halves = [(token[:n], token[n:]) for n in range(1, len(token))]
        known = [(ranks[a], ranks[b], a, b) for a, b in halves if a in ranks and b in ranks]
        merges += [(spelled[a], spelled[b]) for _, _, a, b in sorted(known)]
    flags = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    pattern = ours.encoding._pat_str.replace("{1,3}+", "{1,3}")  # cl100k's possessive count, which changes nothing
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocab = {spelled[token]: rank for token, rank in ranks.items()} | specials  # in vocab too, or they get other ids
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": content, **flags} for content, i in specials.items()],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": True},
    }
