"""Chats, instructions and documents: what is read of them, what is learned, and that records in one window do not meet."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullshard.errors import ConfigurationError
from fullshard.programs.train.chat_template import PLAIN, ChatTemplate
from fullshard.programs.train.config import DataSection, RunConfig
from fullshard.programs.train.config_file import read_config
from fullshard.programs.train.conversations import Conversation, Document, read_record
from fullshard.programs.train.data import Data, open_data
from fullshard.programs.train.data_files import data_files
from fullshard.programs.train.evaluation import window_losses
from fullshard.programs.train.model_source import open_model
from fullshard.programs.train.packed_windows import (
    IGNORED,
    PackedWindows,
    Piece,
    packed,
    positions,
    visible,
)
from fullshard.programs.train.preflight import data_problems
from fullshard.programs.train.weights import materialise
from tests.helpers.ranks import World
from tests.helpers.runs import TINY, records, run, run_each

pytest.importorskip("transformers")

MakeWorld = Callable[[int], World]

ASKED = {"role": "user", "content": "How many?"}
ANSWERED = {"role": "assistant", "content": "Four."}
CHAT = {"messages": [ASKED, ANSWERED]}


# --- what a record is --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        CHAT,
        {"conversations": [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "Four."}]},
        {"prompt": "How many?", "completion": "Four.", "id": 7},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"instruction": "How many?", "input": "", "output": "Four."},
        {"question": "How many?", "answer": "Four."},
        {"messages": [{**ASKED, "content": [{"type": "text", "text": "How many?"}]}, ANSWERED]},
    ],
)  # fmt: skip
def test_conversations_have_several_forms(record: dict[str, Any]) -> None:
    assert read_record("here", record) == Conversation((ASKED, ANSWERED))


def test_inputs_follow_instructions_and_systems_begin_conversations() -> None:
    record = {"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be brief."}
    found = read_record("here", record)
    assert isinstance(found, Conversation)
    assert [each["content"] for each in found.messages] == ["Be brief.", "Add.\n\n1 2", "3"]
    assert read_record("here", {"text": "all of it"}) == Document("all of it")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"body": "x", "title": "y"}, "record 3 of x has the fields body, title"),
        ({"messages": [ASKED]}, "must have an answer, a message of the role assistant; record 3 of x"),
        ({"messages": [{"role": "user"}]}, "messages must be a list of messages"),
        ({"messages": "hello"}, "messages must be a list of messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWERED]},
            "messages must be a list of messages",
        ),
    ],
)  # fmt: skip
def test_a_record_of_another_form_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_record("record 3 of x", record)


# --- files -------------------------------------------------------------------------------------------------


def write_chats(file: Path, chats: Sequence[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return file


def counting(number: int) -> dict[str, Any]:
    return {"prompt": f"After {number}?", "completion": f"{number + 1}, of course"}


def opened(file: Path, *settings: str) -> Data:
    config = read_config(None, [f"data.path={file}", "data.context=48", *settings])
    return open_data(config, open_model(config))


def test_files_of_records_are_known_by_their_names(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.parquet", "c.jsonl.gz", "d.txt.xz", "e.txt", "f.json", "g.gz"):
        (tmp_path / name).touch()
    found = data_files(DataSection(path=tmp_path))
    assert found.kind == "records"
    assert [path.name for path in found.paths] == ["a.jsonl", "b.parquet", "c.jsonl.gz", "d.txt.xz"]
    assert "e.txt" in str(found.left_out[0]) and 'data.kind = "text"' in str(found.left_out[0])
    wanted = data_files(DataSection(path=tmp_path, kind="records"))
    assert "f.json" in [path.name for path in wanted.paths]
    assert data_files(DataSection(path=tmp_path, kind="text")).kind == "text"
    assert data_files(DataSection(path=tmp_path / "f.json")).kind == "text"
    with pytest.raises(ConfigurationError, match=r"Records are read from \.jsonl"):
        data_files(DataSection(path=tmp_path / "e.txt", kind="records"))


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "a.jsonl", [CHAT, CHAT])
    file.write_text(file.read_text() + "\n{nothing\n")
    with pytest.raises(ConfigurationError, match="line 4 is not"):
        opened(file)
    file.write_text('["a list"]\n')
    with pytest.raises(ConfigurationError, match=r"record 1 of .*a\.jsonl is a list"):
        opened(file)


def test_json_arrays_are_read_too(tmp_path: Path) -> None:
    chats = [counting(number) for number in range(20)]
    lines = opened(write_chats(tmp_path / "a.jsonl", chats))
    (tmp_path / "b.json").write_text(json.dumps(chats))
    assert torch.equal(
        opened(tmp_path / "b.json", "data.kind=records").split[0][0].values,
        lines.split[0][0].values,
    )


def test_parquet_and_compressed_files_are_read_by_datasets(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    import pyarrow
    from pyarrow import parquet

    chats = [{"messages": [ASKED, {**ANSWERED, "content": str(n)}]} for n in range(20)]
    plain = opened(write_chats(tmp_path / "a.jsonl", chats))
    parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "b.parquet")
    with gzip.open(tmp_path / "c.jsonl.gz", "wb") as file:
        file.write((tmp_path / "a.jsonl").read_bytes())
    for name in ("b.parquet", "c.jsonl.gz"):
        found = opened(tmp_path / name)
        assert torch.equal(found.split[0][0].values, plain.split[0][0].values), name
    with gzip.open(tmp_path / "d.txt.gz", "wb") as file:
        file.write(b"one document\nof two lines\n" * 20)
    document = opened(tmp_path / "d.txt.gz")
    assert bytes(document.split[0][0].values.tolist()) == b"one document\nof two lines\n" * 20
    (tmp_path / "e.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigurationError, match=r"must be able to read .*e\.parquet"):
        opened(tmp_path / "e.parquet")


def test_what_reads_records_must_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.parquet").touch()
    config = read_config(None, [f"data.path={tmp_path}"])
    monkeypatch.setattr("fullshard.programs.train.record_files.find_spec", lambda name: None)
    monkeypatch.setattr("fullshard.programs.train.preflight.find_spec", lambda name: None)
    found = " ".join(problem.text for problem in data_problems(config))
    assert "Install fullshard[datasets]" in found and "Install fullshard[transformers]" in found


# --- templates ---------------------------------------------------------------------------------------------


def test_answers_are_what_follows_the_prompt_for_them() -> None:
    template = ChatTemplate(None, PLAIN)
    assert template.render_parts([ASKED, ANSWERED, ASKED, ANSWERED]) == [
        ("<|user|>\nHow many?<|end|>\n<|assistant|>\n", False),
        ("Four.<|end|>\n", True),
        ("<|user|>\nHow many?<|end|>\n<|assistant|>\n", False),
        ("Four.<|end|>\n", True),
    ]
    assert template.end == "<|end|>"


def test_a_template_that_forgets_or_refuses_is_an_error_that_says_so() -> None:
    last = "{% for message in messages[-2:] %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(ConfigurationError, match=r'data\.loss_on = "all"'):
        ChatTemplate(None, last).render_parts([ASKED, ANSWERED, ASKED, ANSWERED])
    with pytest.raises(ConfigurationError, match="refuses one of the roles user, assistant: no"):
        ChatTemplate(None, "{{ raise_exception('no') }}").render([ASKED, ANSWERED])


# --- windows -----------------------------------------------------------------------------------------------


def test_a_window_takes_what_fits() -> None:
    pieces = [Piece(first, length) for first, length in ((0, 5), (6, 6), (13, 3), (17, 2))]
    assert packed(pieces, 8) == [[pieces[0], pieces[2]], [pieces[1], pieces[3]]]


def test_planes_have_inputs_targets_and_segments() -> None:
    tokens = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    is_target = torch.tensor([0, 0, 1, 1, 0, 1, 1]).bool()
    pieces = [Piece(0, 3), Piece(4, 2)]  # of 4 and 3 tokens
    windows = PackedWindows(tokens, is_target, pieces, context=6, packing=True)
    no = IGNORED
    assert windows.rows([0]).tolist() == [
        [[1, 2, 3, 5, 6, 0], [no, 3, 4, 6, 7, no], [0, 0, 0, 1, 1, 2]]
    ]
    assert (len(windows), windows.tokens, windows.scale([0])) == (1, 4, 1 / 4)
    apart = PackedWindows(tokens, is_target, pieces, context=6, packing=False)
    assert apart.rows([0, 1]).tolist() == [
        [[1, 2, 3, 0, 0, 0], [no, 3, 4, no, no, no]],
        [[5, 6, 0, 0, 0, 0], [6, 7, no, no, no, no]],
    ]
    assert apart.scale([0, 1]) == 2 / 4


def test_segments_begin_anew_and_see_only_themselves() -> None:
    segments = torch.tensor([[0, 0, 0, 1, 1, 2]])
    assert positions(segments).tolist() == [[0, 1, 2, 0, 1, 0]]
    seen = visible(segments)[0, 0]
    assert seen[4].tolist() == [False, False, False, True, True, False]
    assert seen[2].tolist() == [True, True, True, False, False, False]


def test_only_answers_are_learned_unless_all_is(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "a.jsonl", [counting(number) for number in range(20)])

    def learned(*settings: str) -> str:
        planes = opened(file, "data.packing=false", "data.context=80", *settings).training.rows([3])
        targets = planes[0, 1]
        return bytes(targets[targets != IGNORED].tolist()).decode()

    assert learned() == "4, of course<|end|>\n"
    whole = "<|user|>\nAfter 3?<|end|>\n<|assistant|>\n4, of course<|end|>\n"
    assert learned("data.loss_on=all") == whole[1:]


def test_long_conversations_are_cut_and_those_without_an_answer_left_out(tmp_path: Path) -> None:
    long = {"prompt": "x", "completion": "y" * 100}
    unanswered = {"prompt": "x" * 100, "completion": "y"}
    chats = [*(counting(number) for number in range(18)), long, unanswered]
    found = opened(write_chats(tmp_path / "a.jsonl", chats), "data.context=80")
    assert "the ends of 1 of 20 conversations" in found.left_out
    assert "1 of 20 records, of which nothing is to be learned" in found.left_out
    assert "19 records in" in found.source
    with pytest.raises(ConfigurationError, match="a record for training and one for evaluation"):
        opened(write_chats(tmp_path / "b.jsonl", [unanswered, long]))


def test_documents_are_learned_whole_and_divided(tmp_path: Path) -> None:
    text = "".join(map(str, range(60)))
    file = write_chats(tmp_path / "a.jsonl", [{"text": text}])
    found = opened(file, "data.packing=false", "data.context=20")
    rows = torch.cat([found.training.rows(range(len(found.training))), found.held_out.rows([0])])
    learned = rows[:, 1].flatten()
    assert bytes(learned[learned != IGNORED].tolist()).decode() == text[1:]


# --- models ------------------------------------------------------------------------------------------------


def llama_folder(folder: Path, vocabulary: int = 256) -> Path:
    """A small Llama with a byte-level tokenizer that has a template of its own."""
    from fullshard.programs.train.tokenizer import Bytes

    folder.mkdir(parents=True)
    Bytes().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def scored(config: RunConfig) -> tuple[Any, Any]:
    source = open_model(config)
    model = source.build()
    materialise(model, torch.device("cpu"))
    source.fill(model, seed=0)
    return source, model.eval()


@pytest.mark.parametrize("model", ["built in", "transformers"])
@torch.no_grad()
def test_records_in_one_window_do_not_see_each_other(tmp_path: Path, model: str) -> None:
    own = ["model.layers=2", "model.width=16", "model.heads=2"]
    if model == "transformers":
        own = [f"model.huggingface={llama_folder(tmp_path / 'llama')}"]
    source, module = scored(read_config(None, own))
    tokens = torch.randint(256, (1, 12), generator=torch.Generator().manual_seed(0))
    segments = torch.tensor([[0] * 5 + [1] * 7])
    packed_scores = source.scores(module, tokens, segments)
    alone = torch.cat(
        [source.scores(module, tokens[:, :5]), source.scores(module, tokens[:, 5:])], dim=1
    )
    torch.testing.assert_close(packed_scores, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(source.scores(module, tokens), alone, rtol=1e-2, atol=1e-3)


@torch.no_grad()
def test_the_loss_is_that_of_the_answers_whatever_the_packing(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "a.jsonl", [counting(number) for number in range(40)])
    small = ["model.layers=2", "model.width=16", "model.heads=2"]
    source, module = scored(read_config(None, small))
    losses: list[Tensor] = []
    for packing in ("true", "false"):
        windows = opened(file, "data.context=120", f"data.packing={packing}").training
        every = range(len(windows))
        scale = windows.scale(every)
        assert scale is not None
        losses.append(
            window_losses(source, module, windows.rows(every), torch.tensor(scale)).mean()
        )
    by_hand = []
    for number in range(38):  # two are held out
        asked = f"<|user|>\nAfter {number}?<|end|>\n<|assistant|>\n".encode()
        all_of_it = torch.tensor([*asked, *f"{number + 1}, of course<|end|>\n".encode()])
        scores = source.scores(module, all_of_it[None, :-1])[0]
        by_hand.append(
            F.cross_entropy(scores[len(asked) - 1 :], all_of_it[len(asked) :], reduction="none")
        )
    torch.testing.assert_close(losses[0], torch.cat(by_hand).mean())
    torch.testing.assert_close(losses[1], losses[0])


# --- runs --------------------------------------------------------------------------------------------------


def chat_run(folder: Path, *settings: str) -> RunConfig:
    file = write_chats(folder / "chats.jsonl", [counting(number % 10) for number in range(60)])
    own = [f"run.folder={folder / 'run'}", f"data.path={file}", "data.context=64"]
    return read_config(None, [*TINY, *own, *settings])


def test_losses_of_chats_do_not_depend_on_how_a_run_is_spread(
    world: MakeWorld, tmp_path: Path
) -> None:
    [one] = world(1).run(run, chat_run(tmp_path / "one"))
    settings: list[tuple[str, ...]] = [
        ("train.accumulate=2",),
        ("sharding.api=fsdp1", "compute.checkpoint_activations=blocks"),
        ("compute.compile=blocks", "compute.fuse_gradients=true"),
    ]
    configs = [chat_run(tmp_path / str(n), *each) for n, each in enumerate(settings)]
    for results in world(2).run(run_each, configs):
        for result in results:
            assert result.losses == pytest.approx(one.losses, rel=1e-4)
            assert result.evaluations == pytest.approx(one.evaluations, rel=1e-4)
    assert one.losses[6] < one.losses[1] - 0.5


def test_a_run_on_chats_resumes(world: MakeWorld, tmp_path: Path) -> None:
    [whole] = world(1).run(run, chat_run(tmp_path / "whole", "schedule.kind=constant"))
    parts = chat_run(tmp_path / "parts", "schedule.kind=constant", "train.steps=3")
    world(1).run(run, parts)
    [rest] = world(1).run(run, chat_run(tmp_path / "parts", "schedule.kind=constant"))
    assert rest.losses == {step: whole.losses[step] for step in (4, 5, 6)}


@pytest.mark.slow
def test_a_tuned_model_answers_in_the_template_of_its_tokenizer(
    world: MakeWorld, tmp_path: Path
) -> None:
    folder = llama_folder(tmp_path / "llama")
    chats = [
        {"prompt": "sky?", "completion": "blue"},
        {"prompt": "grass?", "completion": "green"},
    ]
    file = write_chats(tmp_path / "chats.jsonl", chats * 50)
    config = read_config(
        None,
        [
            *TINY[3:],
            *(f"run.folder={tmp_path / 'run'}", f"data.path={file}", "data.context=64"),
            *(f"model.huggingface={folder}", "train.steps=60", "checkpoint.export=true"),
            *("samples.count=1", "samples.prompt=grass?", "samples.tokens=12"),
            "samples.temperature=0",
        ],
    )
    world(2).run(run, config)
    [samples] = records(config, "samples")
    assert samples["texts"] == ("[user]grass?\n[assistant]green",)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    for chat in chats:
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": chat["prompt"]}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        answer = model.generate(**asked, max_new_tokens=6, do_sample=False)
        said = tokenizer.decode(answer[0][asked["input_ids"].shape[1] :])
        assert said.startswith(f"{chat['completion']}\n"), said


def test_the_export_of_a_tokenizer_without_a_template_has_the_plain_one(
    world: MakeWorld, tmp_path: Path
) -> None:
    config = chat_run(tmp_path, "train.steps=1", "checkpoint.export=true")
    world(1).run(run, config)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.run.folder / "model")
    text = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>\nHow many?<|end|>\n<|assistant|>\n"
