"""Where settings come from, which are refused, and that no message gives a secret away."""

from pathlib import Path

import pytest

from rag_pipeline.console import plain
from rag_pipeline.errors import ConfigurationError
from rag_pipeline.settings import Settings, load_settings, masked
from rag_pipeline_tests.conftest import write


def load(folder: Path, toml: str = "", **flags: object) -> Settings:
    write(folder / "rag_pipeline.toml", toml)
    return load_settings(project_root=folder, flags={name.replace("__", "."): value for name, value in flags.items()})


def refusal(folder: Path, toml: str = "") -> str:
    with pytest.raises(ConfigurationError) as refused:
        load(folder, toml)
    return str(refused.value)


def test_a_secret_under_a_wrong_name_is_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refusal(tmp_path, '[retrieval.milvus]\npassword = "hunter2"\n')
    assert "Setting retrieval.milvus.password from" in said
    assert "hunter2" not in said
    assert "hunter2" not in refusal(tmp_path, '[retrieval]\nmilvus = "root:hunter2"\n')
    assert "hunter2" not in refusal(tmp_path, '[retrieval.milvus]\ntoken = ["root:hunter2"]\n')
    assert "hunter2" not in refusal(tmp_path, '[[knowledge.roots]]\npath = "x"\ntoken = "hunter2"\n')
    monkeypatch.setenv("RAG_RETRIEVAL__MILVUS__PASSWORD", "hunter2")
    said = refusal(tmp_path)
    assert "from environment RAG_RETRIEVAL__MILVUS__PASSWORD" in said
    assert "hunter2" not in said


def test_a_wrong_value_is_shown_without_the_password_of_a_uri(tmp_path: Path) -> None:
    assert "(found 'many')" in refusal(tmp_path, '[retrieval]\ntop_k = "many"\n')
    said = refusal(tmp_path, '[retrieval.milvus]\nuri = ["http://root:hunter2@host:19530"]\n')
    assert "host:19530" in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pw@host:19530/x", "http://********@host:19530/x"),
        ("http://user:p@ss/w@host", "http://********@host"),
        ("https://token@host", "https://********@host"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("http://host:19530", "http://host:19530"),
        ("Milvus at http://u:p@one and http://u:p@two", "Milvus at http://********@one and http://********@two"),
        ("a@b", "a@b"),
    ],
)
def test_user_information_is_masked(text: str, shown: str) -> None:
    assert masked(text) == shown
    assert plain(text) == shown
    assert plain((text,)) == [shown]


def test_a_variable_of_another_program_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAG_API_KEY", "RAG_STATEDIR", "RAG_OTHER__X"):
        monkeypatch.setenv(name, "x")
    assert load(tmp_path).index.alias == "knowledge"


@pytest.mark.parametrize("name", ["RAG_RETRIEVAL__X", "RAG_STATE_DIR__X", "RAG_RETRIEVAL__TOP_K__X", "rag_index__x"])
def test_a_variable_of_a_known_group_must_name_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    assert refusal(tmp_path)


def test_the_environment_names_the_file_and_the_flag_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a/one.toml", '[index]\nalias = "one"\n')
    write(tmp_path / "b/two.toml", '[index]\nalias = "two"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAG_CONFIG", "a/one.toml")
    settings = load_settings()
    assert (settings.index.alias, settings.project_root) == ("one", tmp_path / "a")
    assert settings.config == tmp_path / "a/one.toml"
    assert {name: origin for name, _, origin in settings.effective()}["index.alias"] == str(settings.config)
    flagged = load_settings(Path("b/two.toml"))
    assert (flagged.index.alias, flagged.config) == ("two", tmp_path / "b/two.toml")
    monkeypatch.setenv("RAG_CONFIG", "")
    assert load_settings().config is None


def test_a_missing_file_that_the_environment_names_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAG_CONFIG", str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigurationError, match=r"absent\.toml \(named by RAG_CONFIG\) does not exist"):
        load_settings()


@pytest.mark.parametrize(
    ("group", "name", "flag"),
    [("knowledge", "allow_mass_deletion", "--allow-mass-deletion"), ("index", "take_over", "--take-over")],
)
def test_what_protects_data_is_lifted_for_one_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, name: str, flag: str
) -> None:
    said = refusal(tmp_path, f"[{group}]\n{name} = true\n")
    assert f"Setting {group}.{name} from {tmp_path / 'rag_pipeline.toml'} is for one run only" in said
    assert flag in said
    assert "run config" in said
    for variable, value in ((f"RAG_{group}__{name}".upper(), "true"), (f"RAG_{group}".upper(), f'{{"{name}": true}}')):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert f"from environment {variable} is for one run only" in refusal(tmp_path)
    settings = load(tmp_path, **{f"{group}__{name}": True})
    assert getattr(getattr(settings, group), name) is True


def test_the_origin_of_a_group_given_as_json_is_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAG_INDEX", '{"alias": "theirs"}')
    origins = {name: (value, origin) for name, value, origin in load(tmp_path).effective()}
    assert origins["index.alias"] == ("theirs", "environment RAG_INDEX")
    assert origins["index.grace_s"][1] == "default"


def test_an_unknown_file_system_is_named(tmp_path: Path) -> None:
    said = refusal(tmp_path, '[index]\nartifacts_uri = "foo://x"\n')
    assert "Setting index.artifacts_uri from" in said
    assert "no file system 'foo'" in said
    assert load(tmp_path, '[index]\nartifacts_uri = "s3://bucket/x"\n').index.artifacts_uri == "s3://bucket/x"
