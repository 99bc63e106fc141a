"""Published models by name: their sizes are those of the publications, and programs take the names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fullshard.errors import ConfigurationError
from fullshard.programs.named_models.published import (
    FOLDER,
    name_of,
    nearest_name,
    published_folder,
    published_names,
)
from fullshard.programs.train.model_argument import file_and_settings
from fullshard.programs.train.preflight import longest_context

PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}
"""As the authors publish them."""

CONTEXTS = {
    "gpt2": 1024,
    "llama2-7b": 4096,
    "llama3-8b": 8192,
    "llama3.1-8b": 131072,
    "mixtral-8x7b": 32768,
    "qwen3-30b-a3b": 40960,
}


def count(name: str) -> int:
    """Return the parameters of a model, from those of one and of two layers."""
    transformers = pytest.importorskip("transformers")
    counts = []
    for layers in (1, 2):
        config = transformers.AutoConfig.from_pretrained(FOLDER / name, local_files_only=True)
        depth, config.num_hidden_layers = config.num_hidden_layers, layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        counts.append(sum(each.numel() for each in model.parameters()))
    one, two = counts
    return one + (depth - 1) * (two - one)


def test_models_have_as_many_parameters_as_their_authors_say() -> None:
    assert set(published_names()) == set(PARAMETERS)
    assert {name: count(name) for name in PARAMETERS} == PARAMETERS


def test_models_know_how_long_their_windows_may_be() -> None:
    assert {name: longest_context(FOLDER / name) for name in CONTEXTS} == CONTEXTS
    for name in PARAMETERS:
        assert longest_context(FOLDER / name)


def test_a_name_stands_for_its_folder() -> None:
    folder = published_folder("llama3-8b")
    assert folder is not None and name_of(folder) == "llama3-8b"
    assert file_and_settings("llama3-8b") == (None, [f'model.huggingface="{folder}"'])
    assert published_folder("..") is None and name_of(Path("llama3-8b")) is None


def test_a_folder_of_the_user_comes_before_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert file_and_settings("gpt2") == (None, ['model.huggingface="gpt2"'])


@pytest.mark.parametrize(
    ("written", "meant"),
    [("Llama-3-8B", "llama3-8b"), ("llama8b", "llama3-8b"), ("Mixtral_8x7B", "mixtral-8x7b"), ("zzz", None)],
)  # fmt: skip
def test_a_name_that_is_nearly_known_is_suggested(written: str, meant: str | None) -> None:
    assert nearest_name(written) == meant
    with pytest.raises(ConfigurationError) as raised:
        file_and_settings(written)
    assert (f"Did you mean {meant}?" in str(raised.value)) == (meant is not None)


def test_the_page_about_plans_lists_all_names() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    assert [name for name in PARAMETERS if f"`{name}`" not in page] == []
