"""From text to tokens and back; which tokenizer a run has."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer, decoders, models, pre_tokenizers, trainers

from fullshard.errors import ConfigurationError
from fullshard.programs.train import data as data_module
from fullshard.programs.train.config import DataSection, ModelSection, RunConfig
from fullshard.programs.train.data import open_data
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.tokenizer import Bytes, HuggingFaceTokenizer, Numbers, open_tokenizer

TEXT = "for x in range(10):\n    print(x, 'é')\n" * 30


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A byte-level tokenizer with some merges."""
    made = FastTokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=alphabet,
            special_tokens=["<end>"],
            show_progress=False,
        ),
    )
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_bytes_and_numbers_go_there_and_back() -> None:
    assert Bytes().decode(Bytes().encode(TEXT)) == TEXT
    assert Bytes().decode([65, 300, 0xFF]) == "A?\ufffd"
    assert Numbers().decode(Numbers().encode("3 500 7")) == "3 500 7"
    assert Numbers().encode("def 5x -2") == []


def test_what_is_known_of_data_and_model_decides(tmp_path: Path, tokenizer_file: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes(bytes(100))
    folder = tmp_path / "model"
    folder.mkdir()

    def kind(
        *, path: str | None = None, tokenizer: Path | None = None, in_model: bool = False
    ) -> type:
        section = DataSection(path=tmp_path / path if path else None, tokenizer=tokenizer)
        model = ModelSection(huggingface=folder if in_model else None)
        return type(open_tokenizer(RunConfig(data=section, model=model)))

    assert kind() is Bytes
    assert kind(path="tokens.bin") is Numbers
    assert kind(path="tokens.bin", tokenizer=tokenizer_file) is HuggingFaceTokenizer
    assert kind(in_model=True) is Bytes
    (folder / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    assert kind(in_model=True) is HuggingFaceTokenizer


def test_text_is_tokenised_and_the_decoder_knows_all_tokens(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text(TEXT)
    expected = FastTokenizer.from_file(str(tokenizer_file)).encode(TEXT).ids
    assert len(expected) < len(TEXT) / 2

    def trained_on(place: Path) -> list[int]:
        section = DataSection(path=tmp_path / "text", tokenizer=place, context=4, held_out=0.1)
        config = RunConfig(data=section)
        source = open_model(config)
        assert 256 < source.vocabulary <= 300
        windows = open_data(config, source).training
        return windows.rows(range(len(windows)))[:, :-1].flatten().tolist()

    for place in (tokenizer_file, tokenizer_file.parent):
        tokens = trained_on(place)
        assert tokens == expected[: len(tokens)]
    monkeypatch.setattr(
        data_module, "CHUNK_LENGTH", 100
    )  # between lines, and there no token is merged
    tokens = trained_on(tokenizer_file)
    assert tokens != expected[: len(tokens)]
    text = HuggingFaceTokenizer(tokenizer_file).decode(tokens)
    assert len(text) > 0.8 * len(TEXT) and TEXT.startswith(text)


def test_a_tokenizer_goes_along_with_an_exported_model(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    for name, place in (("of_file", tokenizer_file), ("of_folder", tokenizer_file.parent)):
        (tokenizer_file.parent / "config.json").write_text("the model's, not the tokenizer's")
        target = tmp_path / name
        target.mkdir()
        HuggingFaceTokenizer(place).save_pretrained(target)
        again = HuggingFaceTokenizer(target)
        assert again.encode(TEXT) == HuggingFaceTokenizer(place).encode(TEXT)
        assert not (target / "config.json").exists()


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"(?s)cannot be read as one.*Set data\.tokenizer"):
        HuggingFaceTokenizer(tmp_path)
