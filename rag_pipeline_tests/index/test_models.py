"""What a model's name resolves to, and that tokens are counted as the model sees them."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rag_pipeline.errors import ConfigurationError, ModelUnavailableError
from rag_pipeline.index import model_folder, models
from rag_pipeline.index.models import ResolvedModel, load_token_counter, resolve_model
from rag_pipeline_tests.fakes import build_tiny_model, tiny_model

TEXTS = [
    "the pod restarts: CrashLoopBackOff",
    "节点 NotReady，磁盘空间不足；kubelet 驱逐了 3 个 Pod。",
    "",
    " leading and trailing ",
    "Ｆｕｌｌ　ｗｉｄｔｈ～①②\u200b\tcafe\u0301 ﬃ",
    "| a | b |\n|---|---|\n| `x_y` | https://example.org/a?b=c#d |",
    "😀👩‍👩‍👧 </s> <s> [SEP] naïve",
    "restart " * 300,
]


def edit(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    value.update(changes)
    path.write_text(json.dumps(value), encoding="utf-8")


def test_importing_models_and_embedding_loads_no_framework() -> None:
    code = (
        "import sys, rag_pipeline.index.models, rag_pipeline.index.embedding; "
        "print([m for m in ('torch', 'transformers', 'sentence_transformers', 'pandas') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert shown.stdout.strip() == "[]"


def test_profile_is_read_from_the_folder_without_its_weights(tmp_path: Path) -> None:
    folder = build_tiny_model(
        tmp_path / "m", dimension=48, max_tokens=40, query_prompt="ask: ", document_prompt="doc: "
    )
    (folder / "model.safetensors").write_bytes(b"never read as weights")

    model = resolve_model(str(folder), cache_dir=tmp_path / "cache")

    assert model.name == str(folder)
    assert model.path == folder
    profile = model.profile
    assert (profile.query_prompt, profile.document_prompt) == ("ask: ", "doc: ")
    assert (profile.max_tokens, profile.dimension, profile.pooling, profile.normalize) == (40, 48, "mean", True)


def test_profile_follows_dense_layers_pooling_modes_and_the_smaller_limit(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m", max_tokens=40, normalize=False)
    (folder / "sentence_bert_config.json").unlink()
    edit(folder / "tokenizer_config.json", model_max_length=10**30)
    edit(folder / "1_Pooling" / "config.json", pooling_mode_cls_token=True)
    facts = model_folder.read_facts(folder)
    assert (facts.pooling, facts.dimension, facts.max_tokens, facts.normalize) == ("cls+mean", 64, 40, False)

    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 64, "out_features": 20}))
    assert model_folder.read_facts(folder).dimension == 20

    edit(folder / "config_sentence_transformers.json", truncate_dim=8)
    assert model_folder.read_facts(folder).dimension == 8


def test_a_plain_transformers_folder_is_pooled_by_mean(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m")
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "1_Pooling")

    profile = resolve_model(str(folder), cache_dir=tmp_path / "cache").profile

    assert (profile.pooling, profile.dimension, profile.document_prompt) == ("mean", 32, "")


def test_passage_prompt_stands_in_for_a_missing_document_prompt(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m")
    edit(folder / "config_sentence_transformers.json", prompts={"query": "q: ", "passage": "p: "})

    assert resolve_model(str(folder), cache_dir=tmp_path).profile.document_prompt == "p: "


def test_fingerprint_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    first = tiny_model(tmp_path / "a", cache_dir=tmp_path / "cache")
    second = tiny_model(tmp_path / "b", cache_dir=tmp_path / "cache")
    (tmp_path / "b" / "README.md").write_text("A model card changes no vector.")

    assert first.fingerprint == second.fingerprint
    assert resolve_model(str(tmp_path / "b"), cache_dir=tmp_path / "cache").fingerprint == first.fingerprint
    assert len(first.fingerprint) == 16
    assert int(first.fingerprint, 16) >= 0


@pytest.mark.parametrize(
    "options",
    [{"seed": 1}, {"query_prompt": ""}, {"document_prompt": "doc: "}, {"max_tokens": 63}, {"normalize": False}],
)
def test_fingerprint_changes_with_what_decides_a_vector(tmp_path: Path, options: dict[str, object]) -> None:
    first = tiny_model(tmp_path / "a", cache_dir=tmp_path / "cache")
    second = tiny_model(tmp_path / "b", cache_dir=tmp_path / "cache", **options)

    assert first.fingerprint != second.fingerprint


def test_resolving_again_reads_no_weights_and_sees_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tiny_model(tmp_path / "m", cache_dir=tmp_path / "cache")
    read: list[str] = []
    digest = model_folder.hashlib.file_digest
    monkeypatch.setattr(
        model_folder.hashlib, "file_digest", lambda file, name: read.append(Path(file.name).name) or digest(file, name)
    )

    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        again = resolve_model(str(tmp_path / "m"), cache_dir=tmp_path / "cache")
        seconds.append(time.perf_counter() - started)
    assert again == first
    assert read == []
    assert min(seconds) < 0.05

    weights = tmp_path / "m" / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    os.utime(weights, ns=(0, 0))
    assert resolve_model(str(tmp_path / "m"), cache_dir=tmp_path / "cache").fingerprint != first.fingerprint
    assert read == ["model.safetensors"]


@pytest.mark.parametrize("content", ["not json", "[]", '{"files": 3}', '{"files": {"config.json": [1]}}', "{}"])
def test_a_damaged_memory_of_digests_is_made_anew(tmp_path: Path, content: str) -> None:
    first = tiny_model(tmp_path / "m", cache_dir=tmp_path / "cache")
    (memory,) = (tmp_path / "cache" / "fingerprints").iterdir()
    memory.write_text(content)

    assert resolve_model(str(tmp_path / "m"), cache_dir=tmp_path / "cache") == first


def test_a_cache_folder_that_cannot_be_written_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")

    tiny_model(tmp_path / "m", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "modules.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "modules.json").write_text("[]"), "lists no module"),
        (lambda folder: (folder / "modules.json").write_text("[1]"), "not a list of modules"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
        (
            lambda folder: shutil.rmtree(folder / "1_Pooling") or (folder / "config.json").unlink(),
            "how long its vectors",
        ),
        (lambda folder: [path.unlink() for path in folder.glob("*.json")], "holds no embedding model"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path: Path, damage: object, reason: str) -> None:
    folder = build_tiny_model(tmp_path / "m")
    damage(folder)  # type: ignore[operator]

    with pytest.raises(ModelUnavailableError, match=reason) as caught:
        resolve_model(str(folder), cache_dir=tmp_path / "cache")

    assert str(folder) in str(caught.value)


def test_wrong_names_say_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="bundled:all-MiniLM-L6-v2"):
        resolve_model("bundled:bert", cache_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="bundled:multilingual-e5-small"):
        resolve_model(" ", cache_dir=tmp_path)
    with pytest.raises(ModelUnavailableError, match="neither a folder"):
        resolve_model("./no/such/folder", cache_dir=tmp_path)


@pytest.mark.parametrize(("platform", "alternative"), [("linux", "bundled:multilingual-e5-small"), ("win32", "hub id")])
def test_a_missing_minilm_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, alternative: str
) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(models, "sys", SimpleNamespace(platform=platform))

    with pytest.raises(ModelUnavailableError, match=r"pip install 'rag-pipeline\[minilm\]'") as caught:
        resolve_model(models.MINILM_MODEL, cache_dir=tmp_path)

    assert alternative in str(caught.value)


def test_a_hub_id_is_taken_from_the_cache_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    folder = build_tiny_model(tmp_path / "m", query_prompt="", document_prompt="")
    asked: list[tuple[str, bool]] = []

    def snapshot(repository: str, *, local_files_only: bool, ignore_patterns: list[str]) -> str:
        asked.append((repository, local_files_only))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)

    plain = resolve_model("all-MiniLM-L12-v2", cache_dir=tmp_path / "cache")
    e5 = resolve_model("intfloat/multilingual-e5-base", cache_dir=tmp_path / "cache")

    assert asked == [("sentence-transformers/all-MiniLM-L12-v2", True), ("intfloat/multilingual-e5-base", True)]
    assert (plain.profile.query_prompt, plain.profile.document_prompt) == ("", "")
    assert (e5.profile.query_prompt, e5.profile.document_prompt) == ("query: ", "passage: ")
    assert plain.fingerprint != e5.fingerprint


def test_an_incomplete_snapshot_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    (tmp_path / "half").mkdir()
    folder = build_tiny_model(tmp_path / "m")
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda repository, *, local_files_only, ignore_patterns: str(tmp_path / "half" if local_files_only else folder),
    )

    assert resolve_model("someone/model", cache_dir=tmp_path / "cache").path == folder


def test_offline_and_not_cached_says_what_to_do(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rag_pipeline.index.models import resolve_model\n"
        "try: resolve_model('someone/not-there', cache_dir=Path(sys.argv[1]))\n"
        "except Exception as error: print(type(error).__name__, error.exit_code, error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    shown = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert shown.stdout.startswith("ModelUnavailableError 3 ")
    assert "hf download someone/not-there" in shown.stdout
    assert "bundled:multilingual-e5-small" in shown.stdout


def seen_by_the_model(model: ResolvedModel) -> list[int]:
    """Tokens of each text as sentence-transformers would feed them, had the model no limit."""
    from sentence_transformers import SentenceTransformer

    loaded = SentenceTransformer(str(model.path), local_files_only=True, model_kwargs={"dtype": "float32"})
    prompt = model.profile.document_prompt
    ids = loaded.tokenizer([prompt + text for text in TEXTS])["input_ids"]
    # What is fed is that, cut at the maximum.
    fed = [int(loaded.preprocess([text], prompt=prompt)["attention_mask"].sum()) for text in TEXTS]
    assert fed == [min(len(row), model.profile.max_tokens) for row in ids]
    assert loaded.max_seq_length == model.profile.max_tokens
    return [len(row) for row in ids]


def test_counts_equal_what_the_tiny_model_sees(tiny: ResolvedModel) -> None:
    assert load_token_counter(tiny).count_inputs(TEXTS) == seen_by_the_model(tiny)


def test_lower_casing_by_sentence_transformers_is_followed(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "m")
    edit(folder / "sentence_bert_config.json", do_lower_case=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = resolve_model(str(folder), cache_dir=tmp_path / "cache")

    counter = load_token_counter(model)

    assert counter.count(["The POD"]) == counter.count(["the pod"]) == [2]
    assert counter.count_inputs(TEXTS) == seen_by_the_model(model)


@pytest.mark.model
def test_counts_equal_what_e5_sees(e5: ResolvedModel) -> None:
    counter = load_token_counter(e5)
    assert counter.count_inputs(TEXTS) == seen_by_the_model(e5)
    assert (counter.reserved_tokens, counter.max_tokens) == (4, 512)


@pytest.mark.model
def test_counts_equal_what_minilm_sees(minilm: ResolvedModel) -> None:
    # Its tokenizer.json asks for padding and truncation to 128, which must not be obeyed.
    counter = load_token_counter(minilm)
    assert counter.count_inputs(TEXTS) == seen_by_the_model(minilm)
    assert (counter.reserved_tokens, counter.max_tokens) == (2, 256)


@pytest.mark.model
def test_a_folder_without_tokenizer_json_is_counted_too(tmp_path: Path, minilm: ResolvedModel) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for name in ("config.json", "modules.json", "vocab.txt", "tokenizer_config.json", "sentence_bert_config.json"):
        shutil.copy(minilm.path / name, folder / name)
    shutil.copytree(minilm.path / "1_Pooling", folder / "1_Pooling")
    model = resolve_model(str(folder), cache_dir=tmp_path / "cache")

    assert load_token_counter(model).count_inputs(TEXTS) == load_token_counter(minilm).count_inputs(TEXTS)


def test_a_damaged_tokenizer_is_reported(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", cache_dir=tmp_path / "cache")
    (model.path / "tokenizer.json").write_text('{"model": 1}')

    with pytest.raises(ModelUnavailableError, match="tokenizer of"):
        load_token_counter(model)


def test_count_and_reserved_tokens_add_up(tiny: ResolvedModel) -> None:
    counter = load_token_counter(tiny)
    assert counter.count(["the pod", "节点"]) == [2, 2]
    assert counter.reserved_tokens == 4  # [CLS] passage : [SEP]
    assert counter.count_inputs(["the pod", "节点"]) == [6, 6]
    assert counter.max_tokens == 64
    assert counter.count([]) == []
    assert counter.count(["pod"] * 3000) == [1] * 3000


@pytest.mark.model
def test_offsets_are_code_points_of_the_text_as_given(e5: ResolvedModel) -> None:
    counter = load_token_counter(e5)
    text = "😀 ﬃ①～节点 restart\u200bkubelet"

    offsets = counter.offsets(text)

    assert len(offsets) == counter.count([text])[0]
    covered = {index for start, end in offsets for index in range(start, end)}
    assert {
        index for index, character in enumerate(text) if not character.isspace() and character != "\u200b"
    } <= covered
    assert offsets == sorted(offsets)
    assert offsets[-1][1] == len(text)
