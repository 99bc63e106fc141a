"""What is said about model and data before any rank starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fullshard.programs.train.config import DataSection, ModelSection, RunConfig
from fullshard.programs.train.preflight import data_problems, model_problems

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 64,
}


def of_model(context: int = 16, **section: Any) -> list[str]:
    config = RunConfig(model=ModelSection(**section), data=DataSection(context=context))
    return [problem.text for problem in model_problems(config)]


def of_data(vocabulary: int | None = None, **section: Any) -> list[str]:
    config = RunConfig(
        model=ModelSection(vocabulary=vocabulary), data=DataSection(**{"context": 9, **section})
    )
    return [problem.text for problem in data_problems(config)]


def folder_with(folder: Path, configuration: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(configuration))
    return folder


def test_the_defaults_have_no_problems_and_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from fullshard.programs.train.config import RunConfig\n"
        "from fullshard.programs.train.preflight import data_problems, model_problems\n"
        "print([*model_problems(RunConfig()), *data_problems(RunConfig())], 'torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "[] False\n"


def test_a_decoder_whose_heads_cannot_turn_pairs_is_refused() -> None:
    [problem] = of_model(width=130)
    assert "width 130 and heads 4" in problem
    assert "136 would do as model.width" in problem
    assert of_model(width=136) == []


def test_a_folder_of_transformers_is_looked_into(tmp_path: Path) -> None:
    [problem] = of_model(huggingface=tmp_path / "nowhere")
    assert "there is no such folder" in problem
    [problem] = of_model(huggingface=tmp_path)
    assert "it has none" in problem
    assert of_model(huggingface=folder_with(tmp_path, LLAMA)) == []
    assert of_model(huggingface=folder_with(tmp_path, {"model_type": "llama"})) == []
    for content, message in {
        "[]": "model_type",
        "{}": "model_type",
        "{": "cannot be read",
    }.items():
        (tmp_path / "config.json").write_text(content)
        [problem] = of_model(huggingface=tmp_path)
        assert message in problem


@pytest.mark.parametrize(
    ("model_type", "architecture"), [("bert", "BertForMaskedLM"), ("vit", "ViTModel")]
)
def test_a_model_that_does_not_predict_the_next_token_is_refused(
    tmp_path: Path, model_type: str, architecture: str
) -> None:
    configuration = {"model_type": model_type, "architectures": [architecture]}
    [problem] = of_model(huggingface=folder_with(tmp_path, configuration))
    assert f"causal language model; {tmp_path / 'config.json'} is of {architecture}" in problem


def test_all_problems_of_a_model_are_told_at_once(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, LLAMA)
    long, weightless = of_model(context=65, huggingface=folder, pretrained=True)
    assert "65 against 64" in long
    assert "model.safetensors" in weightless


def test_all_problems_of_data_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x" * 101)
    (tmp_path / "b.npy").write_bytes(b"not numpy's")
    odd, not_numpy, unknown = of_data(path=tmp_path)
    assert "a.bin must be tokens of 2 bytes" in odd
    assert "b.npy is not an array" in not_numpy
    assert "set model.vocabulary, or data.tokenizer" in unknown
    tokenizer, *_ = of_data(path=tmp_path, tokenizer=tmp_path / "nowhere")
    assert f"there is none at {tmp_path / 'nowhere'}" in tokenizer


def test_too_little_data_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"t" * 19)
    [problem] = of_data(path=tmp_path / "text")
    assert "19 tokens" in problem
    (tmp_path / "tokens.bin").write_bytes(b"t" * 38)
    [problem] = of_data(vocabulary=8, path=tmp_path / "tokens.bin")
    assert "19 tokens" in problem
    [problem] = of_data(path=tmp_path / "nowhere")
    assert "there is none" in problem


def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fullshard.programs.train.preflight.find_spec", lambda name: None)
    problems = of_model(huggingface=folder_with(tmp_path, LLAMA))
    assert all("Install fullshard[transformers]" in problem for problem in problems)
    assert len(problems) == 2
    [problem] = of_data(tokenizer=tmp_path)
    assert "needs the package tokenizers" in problem
