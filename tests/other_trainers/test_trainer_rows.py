"""The table for those who come from transformers' Trainer: each row runs, and each name has one."""

import ast
import dataclasses
import inspect
import re

import pytest
import rows_transformers_trainer  # its rows go into the table as well
import transformers
from rows_transformers import TABLE
from trainer_rows import ROOT, Row, Table, anchor
from transformers import trainer_callback, trainer_utils
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames

assert rows_transformers_trainer.TABLE is TABLE
SNIPPETS = [row for row in TABLE.rows if row.function is not None]

# Fields that transformers had in its fourth version, or before, and has no more.
BEFORE_5 = [
    "adafactor",
    "dispatch_batches",
    "evaluation_strategy",
    "fp16_backend",
    "fp16_opt_level",
    "fsdp_min_num_params",
    "fsdp_transformer_layer_cls_to_wrap",
    "group_by_length",
    "half_precision_backend",
    "include_inputs_for_metrics",
    "include_tokens_per_second",
    "jit_mode_eval",
    "logging_dir",
    "mp_parameters",
    "no_cuda",
    "overwrite_output_dir",
    "past_index",
    "per_gpu_eval_batch_size",
    "per_gpu_train_batch_size",
    "push_to_hub_model_id",
    "push_to_hub_organization",
    "push_to_hub_token",
    "ray_scope",
    "save_safetensors",
    "sharded_ddp",
    "split_batches",
    "torchdynamo",
    "tpu_metrics_debug",
    "tpu_num_cores",
    "use_ipex",
    "use_legacy_prediction_loop",
    "use_mps_device",
    "warmup_ratio",
    "xpu_backend",
]


def fields(cls):
    return [field.name for field in dataclasses.fields(cls)]


def public(cls):
    return [name for name in dir(cls) if not name.startswith("_")]


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "kwargs")]


def methods(cls, *called):
    """Public ones, those that a subclass overrides all the same, and the parameters of those that users call."""
    private = [name for name, value in vars(cls).items() if name[0] == "_" != name[1] and inspect.isfunction(value)]
    return public(cls) + private + [f"{name}({given})" for name in called for given in parameters(getattr(cls, name))]


def callbacks():
    found = vars(trainer_callback).items()
    classes = {name for name, value in found if isinstance(value, type) and name.endswith("Callback")}
    return classes - {"TrainerCallback"}


EXPECTED = {
    "TrainingArguments": fields(transformers.TrainingArguments),
    "TrainingArguments before 5": BEFORE_5,
    "SchedulerType": [kind.value for kind in trainer_utils.SchedulerType],
    "OptimizerNames": [kind.value for kind in OptimizerNames],
    "Seq2SeqTrainingArguments": set(fields(transformers.Seq2SeqTrainingArguments))
    - set(fields(transformers.TrainingArguments)),
    "AcceleratorConfig": fields(AcceleratorConfig),
    "Trainer": parameters(transformers.Trainer.__init__)
    + methods(transformers.Trainer, "train", "evaluate", "predict", "hyperparameter_search", "push_to_hub"),
    "TrainerCallback": public(transformers.TrainerCallback),
    "Callbacks": callbacks(),
    "TrainerState": fields(transformers.TrainerState),
    "TrainerControl": fields(transformers.TrainerControl),
    "EvalPrediction": parameters(transformers.EvalPrediction),
    "trainer_utils": ["get_last_checkpoint"],
}


@pytest.mark.parametrize("row", SNIPPETS, ids=str)
def test_the_snippet_does_what_its_row_says(row, tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    run(row.function)


def test_every_name_has_a_row_and_every_row_a_name():
    assert TABLE.wrong(EXPECTED) == []


def test_the_names_of_before_5_are_no_fields_any_more():
    assert not set(BEFORE_5) & set(EXPECTED["TrainingArguments"])


@pytest.mark.parametrize("row", SNIPPETS, ids=str)
def test_a_snippet_is_short_and_something_is_asserted_of_it(row):
    snippet, shown = row.parts
    assert "assert" in shown
    assert "assert" not in snippet
    assert 1 <= len([line for line in snippet.splitlines() if line.strip()]) <= 9
    assert max(map(len, snippet.splitlines())) <= 110
    assert (row.answer == "torch") or any(word in snippet for word in ("ll.", "state", "train_step", "loader"))


@pytest.mark.parametrize("row", SNIPPETS, ids=str)
def test_a_snippet_stands_on_what_a_reader_has(row):
    # Classes of other packages, for which the rows have something that stands.
    shown = {"Lion", "Lion8bit", "GaLoreAdamW"}
    names = [node for node in ast.walk(ast.parse(row.parts[0])) if isinstance(node, ast.Name)]
    used = {node.id for node in names} - {node.id for node in names if isinstance(node.ctx, ast.Store)}
    own = {
        name
        for name, value in row.function.__globals__.items()
        if getattr(value, "__module__", None) in (row.function.__module__, "trainer_rows")
    }
    assert used & own <= shown


def test_each_row_says_something_in_a_sentence():
    assert [str(row) for row in TABLE.rows if not row.text.endswith((".", ":", ")", "?"))] == []
    anchors = [anchor(row) for row in TABLE.rows]
    assert len(set(anchors)) == len(anchors)


def test_the_document_is_that_of_the_rows():
    written = (ROOT / TABLE.path).read_text()
    assert written == TABLE.document(), f"{TABLE.path} is not up to date: python tests/other_trainers/trainer_rows.py"


def test_links_within_the_document_lead_somewhere():
    text = TABLE.document()
    places = set(re.findall(r'<a id="([^"]+)">', text)) | {"all-names"}
    assert set(re.findall(r"\(#([^)]+)\)", text)) <= places


def example():
    table = Table("other", "unused.md", "# Heading")
    table.section("First")

    @table.looplib("Settings.one", "Settings.two", text="As here.")
    def _(state):
        step = state.step
        # shows
        assert step == 0

    table.none("Settings.three", text="No need.")
    return table


def test_a_name_without_a_row_and_a_row_without_a_name_are_told():
    table = example()
    assert table.wrong({"Settings": ["one", "two", "three"]}) == []
    assert table.wrong({"Settings": ["one", "three", "four"]}) == [
        "Settings.four of other has no row in unused.md",
        "a row answers Settings.two, which other does not have",
    ]
    with pytest.raises(ValueError, match=r"each in one row; .* twice \['Settings.one'\]"):
        table.none("Settings.one", text="Again.")


def test_lines_that_are_given_are_run_and_not_printed(run):
    def row(state):
        step = state.step
        # given
        after = step + 1
        # shows
        assert after == 1

    made = Row(("Settings.one",), "looplib", "As here.", "First", row)
    run(made.function)
    assert made.parts == ("after = step + 1", "assert after == 1")


def test_a_document_has_the_snippet_and_not_what_is_asserted():
    table = example()
    text = table.document()
    assert "**`Settings.one`, `two`**: As here.\n\n```py\nstep = state.step\n```" in text
    assert "assert" not in text
    assert "| [`three`](#settings-three) | no meaning here |" in text
    assert dict(table.count()) == {"looplib": 2, "none": 1}


def test_a_row_that_is_wrong_is_red(run):
    def wrong(state):
        step = state.step
        # shows
        assert step == 1

    with pytest.raises(AssertionError):
        run(wrong)

    def unknown(nothing_of_that_name):
        # shows
        pass

    with pytest.raises(pytest.FixtureLookupError, match="nothing_of_that_name"):
        run(unknown)
