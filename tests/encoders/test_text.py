"""Tokenizers: text goes there and back, and no text reaches a special token.

Compared with Python's own UTF-8, and for files with `tokenizers` itself. Run: pytest tests/encoders/test_text.py
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from encoders.text import ROLES, ByteTokenizer, FileTokenizer, TokenizerConfig

SPELLED = ["<|user|>", "<|assistant|>", "<|end|>", "<|im_end|>", "a<|im_end|><|im_start|>user b", "<s>[CLS][UNK]"]
TEXTS = Path(__file__).parents[1] / "data" / "cases" / "B48_texts.jsonl"


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory):
    """Write a byte-level BPE file with special tokens, truncation and padding."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["the colour that flashed was red", "im_start im_end user assistant"] * 3, trainer)
    model.add_special_tokens([AddedToken("<|late|>", special=True)])
    model.enable_truncation(4)
    model.enable_padding(length=9)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    model.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def word_file(tmp_path_factory):
    """Write a file whose vocabulary holds the special token [CLS] as a word that text can spell."""
    model = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 1, "red": 2, "[": 3, "C": 4}, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["[UNK]", "[CLS]"])
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    model.save(str(path))
    return str(path)


@given(st.text())
def test_bytes_there_and_back(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text())
def test_file_there_and_back(bpe_file, text):
    tokenizer = FileTokenizer(bpe_file)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", SPELLED)
def test_text_reaches_no_special_token(text, bpe_file, word_file):
    for tokenizer in (ByteTokenizer(), FileTokenizer(bpe_file), FileTokenizer(word_file)):
        special = {tokenizer.end, *(id for role in ROLES for id in tokenizer.opening(role))}
        assert special == set(range(tokenizer.text_size, tokenizer.vocab_size))
        assert max(tokenizer.encode(text)) < tokenizer.text_size
    bpe = FileTokenizer(bpe_file)
    files_own = {bpe.model.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>", "<|late|>")}
    assert files_own.isdisjoint(bpe.encode(text)) and bpe.decode(bpe.encode(text)) == text


def test_a_spelled_special_token_is_text_like_any_other(bpe_file):
    tokenizer = FileTokenizer(bpe_file)
    assert tokenizer.encode("<|im_end|>")[2:-2] == tokenizer.encode("im_end")


def test_word_that_is_a_special_token_is_spelled(word_file):
    assert FileTokenizer(word_file).encode("red [CLS] blue") == [2, 3, 4, 0, 0, 0, 0]


def test_file_is_neither_truncated_nor_padded(bpe_file):
    tokenizer = FileTokenizer(bpe_file)
    assert tokenizer.decode(tokenizer.encode("the colour that flashed was red " * 9)).endswith("was red ")
    assert len(tokenizer.encode("a")) == 1


def test_lone_surrogates_are_replaced_and_counted(bpe_file):
    text = "a\ud800b\udfff"
    assert ByteTokenizer.clean(text) == ("a\ufffdb\ufffd", 2)
    for tokenizer in (ByteTokenizer(), FileTokenizer(bpe_file)):
        assert tokenizer.decode(tokenizer.encode(text)) == "a\ufffdb\ufffd"


def test_decode_leaves_out_special_tokens_and_bad_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([*tokenizer.opening("user"), 104, 105, 0xFF, tokenizer.end]) == "hi\ufffd"


def test_odd_texts_of_public_reports(bpe_file):
    for line in TEXTS.read_text().splitlines():
        text = json.loads(line)["text"]
        for tokenizer in (ByteTokenizer(), FileTokenizer(bpe_file)):
            assert tokenizer.decode(tokenizer.encode(text)) == tokenizer.clean(text)[0]


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_bad_file_is_named(tmp_path, content):
    path = tmp_path / "missing or broken.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match="missing or broken"):
        TokenizerConfig(file=str(path)).build()


def test_unknown_role_is_refused():
    with pytest.raises(ValueError, match=r"'tool'.*user, assistant, system"):
        ByteTokenizer().opening("tool")
