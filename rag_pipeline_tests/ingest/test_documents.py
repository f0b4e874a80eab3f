"""Finding, decoding and reading documents."""

import os
from pathlib import Path
from random import Random

import pytest

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.ingest.documents import Root, discover, parse_document, read_document
from rag_pipeline.records import Document, Issue
from rag_pipeline_tests.ingest.counting import chunks_of

TEXT = "# 磁盘空间不足\n\n节点磁盘写满了，请清理镜像和日志文件，然后检查容器状态。\n"


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n", encoding="utf-8")


def sources(*roots: Root) -> list[str]:
    return [file.source for file in discover(roots)[0]]


def read(raw: bytes) -> tuple[Document, list[Issue]]:
    parsed, issues = parse_document("a.md", raw)
    assert parsed is not None
    return parsed, issues


def test_discover_finds_markdown_of_any_case_sorted(tmp_path: Path) -> None:
    write(tmp_path, "b.md", "A.MD", "sub/c.Markdown", "sub/d.txt", "empty.md/e.md")
    files, issues = discover([Root("k", tmp_path)])
    assert [file.source for file in files] == ["A.MD", "b.md", "empty.md/e.md", "sub/c.Markdown"]
    assert issues == []
    assert files[1].size == 7
    assert len(files[1].digest) == 64


def test_several_roots_prefix_the_source_but_not_the_category(tmp_path: Path) -> None:
    write(tmp_path, "one/a.md", "two/db/a.md")
    roots = [Root("one", tmp_path / "one"), Root("two", tmp_path / "two")]
    files, _ = discover(roots)
    documents = [read_document(file)[0] for file in files]
    assert [(each.source, each.category) for each in documents if each] == [("one/a.md", ""), ("two/db/a.md", "db")]


def test_hidden_large_and_leaving_files_are_reported(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(root, "a.md", ".hidden.md", ".git/x.md", ".trash/x.md", "big.md")
    write(tmp_path, "outside/o.md")
    (root / "big.md").write_bytes(b"x" * 101)
    (root / "link.md").symlink_to(tmp_path / "outside/o.md")
    (root / "gone.md").symlink_to(root / "nowhere.md")
    (root / "folder").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "pipe.md")
    files, issues = discover([Root("k", root)], max_bytes=100)
    assert [file.source for file in files] == ["a.md"]
    assert {(issue.source, issue.rejected) for issue in issues} == {
        (".hidden.md", False),
        (".trash", False),
        ("big.md", True),
        ("folder", True),
        ("gone.md", True),
        ("link.md", True),
        ("pipe.md", True),
    }


def test_links_inside_the_root_are_followed_once(tmp_path: Path) -> None:
    # As Kubernetes mounts a ConfigMap.
    write(tmp_path, "..2026/a.md", "..2026/sub/b.md", "real/c.md")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "a.md").symlink_to("..data/a.md")
    (tmp_path / "sub").symlink_to("..data/sub")
    (tmp_path / "again").symlink_to("real")
    assert sources(Root("k", tmp_path)) == ["a.md", "real/c.md", "sub/b.md"]


def test_a_name_that_is_no_unicode_is_reported(tmp_path: Path) -> None:
    try:
        (tmp_path / os.fsdecode(b"caf\xe9.md")).write_text("x")
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    files, (issue,) = discover([Root("k", tmp_path)])
    assert (files, issue.source, issue.rejected) == ([], "caf\\xe9.md", True)


@pytest.mark.parametrize("failing", ["folder", "file"])
def test_what_cannot_be_read_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    write(tmp_path, "a.md", "locked/b.md")

    def refuse(path: object, *args: object) -> object:
        if "locked" in str(path):
            raise PermissionError(13, "Permission denied")
        return real(path, *args)  # type: ignore[operator]

    if failing == "folder":
        real: object = os.scandir
        monkeypatch.setattr("rag_pipeline.ingest.documents.os.scandir", refuse)
    else:
        real = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", refuse)
    files, (issue,) = discover([Root("k", tmp_path)])
    assert [file.source for file in files] == ["a.md"]
    assert (issue.source, issue.rejected) == ("locked" if failing == "folder" else "locked/b.md", True)
    assert "could not be read (Permission denied)" in issue.reason


def test_a_file_that_vanished_is_rejected(tmp_path: Path) -> None:
    write(tmp_path, "a.md")
    (file,), _ = discover([Root("k", tmp_path)])
    (tmp_path / "a.md").unlink()
    parsed, (issue,) = read_document(file)
    assert (parsed, issue.rejected, issue.source) == (None, True, "a.md")


@pytest.mark.parametrize("several", [False, True])
def test_an_issue_on_a_root_that_cannot_be_read_covers_all_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    write(tmp_path, "locked/a.md", "open/b.md")
    real = os.scandir

    def refuse(path: object) -> object:
        if str(path) == str(tmp_path / "locked"):
            raise PermissionError(13, "Permission denied")
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr("rag_pipeline.ingest.documents.os.scandir", refuse)
    roots = [Root("one", tmp_path / "locked"), *([Root("two", tmp_path / "open")] if several else [])]
    files, (issue,) = discover(roots)
    assert [file.source for file in files] == (["two/b.md"] if several else [])
    assert (issue.source, issue.rejected) == ("one" if several else "", True)
    assert "Permission denied" in issue.reason


def test_a_link_that_leads_nowhere_may_have_been_a_folder_of_documents(tmp_path: Path) -> None:
    write(tmp_path, "k/a.md", "other/o.txt")
    (tmp_path / "k/unmounted").symlink_to(tmp_path / "nowhere")
    (tmp_path / "k/circle").symlink_to("circle")
    (tmp_path / "k/.lock").symlink_to("user@host.1")
    (tmp_path / "k/table.csv").symlink_to(tmp_path / "other/o.txt")
    files, issues = discover([Root("k", tmp_path / "k")])
    assert [file.source for file in files] == ["a.md"]
    assert [(issue.source, issue.rejected) for issue in issues] == [("circle", True), ("unmounted", True)]
    assert "leads nowhere" in issues[1].reason


@pytest.mark.parametrize(("error", "said"), [(13, "Permission denied"), (36, "File name too long")])
def test_a_root_that_cannot_be_looked_at_is_a_wrong_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, said: str
) -> None:
    real = Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if path.name == "shut":
            raise OSError(error, said, str(path))
        return real(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ConfigurationError, match=rf"shut' cannot be looked at \({said}\)"):
        discover([Root("k", tmp_path / "shut")])


@pytest.mark.parametrize(("name", "said"), [("x" * 5000, "File name too long"), ("a\0b", "null byte")])
def test_a_root_name_that_no_file_system_takes_is_a_wrong_setting(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        discover([Root("k", tmp_path / name)])


def test_a_missing_root_is_named(tmp_path: Path) -> None:
    write(tmp_path, "a.md")
    with pytest.raises(ConfigurationError, match="nowhere' does not exist"):
        discover([Root("k", tmp_path / "nowhere")])
    with pytest.raises(ConfigurationError, match=r"a\.md' is not a folder"):
        discover([Root("k", tmp_path / "a.md")])
    with pytest.raises(ConfigurationError, match="'k' is blank"):
        discover([Root("k", tmp_path), Root("k", tmp_path)])


@pytest.mark.parametrize(
    ("raw", "encoding"),
    [
        (TEXT.encode(), "utf-8"),
        (TEXT.encode("utf-8-sig"), "utf-8-sig"),
        (TEXT.encode("utf-16"), "utf-16"),
        (b"\xfe\xff" + TEXT.encode("utf-16-be"), "utf-16"),
        (TEXT.encode("gb18030"), "gb18030"),
        ("# 磁盘满\n\n清理日志。".encode("gb18030"), "gb18030"),
    ],
)
def test_encodings(raw: bytes, encoding: str) -> None:
    parsed, issues = read(raw)
    assert (parsed.encoding, issues) == (encoding, [])
    assert TEXT.startswith(parsed.text[:3])
    assert "\ufffd" not in parsed.text


def test_isolated_bad_bytes_are_replaced_and_reported_with_their_line() -> None:
    raw = TEXT.encode() + b"\r\n\xff here\n" + TEXT.encode() * 3
    parsed, (issue,) = read(raw)
    assert parsed.encoding == "utf-8"
    assert parsed.text == TEXT + "\n\ufffd here\n" + TEXT * 3
    assert (issue.line, issue.rejected) == (5, False)


@pytest.mark.parametrize(
    "raw",
    [
        bytes(range(256)) * 20,
        b"\x89PNG\r\n\x1a\n" + bytes(1000),
        TEXT.encode("utf-16-le") * 9,
        Random(1).randbytes(5000),
    ],
)
def test_binary_is_rejected(raw: bytes) -> None:
    parsed, (issue,) = parse_document("a.md", raw)
    assert parsed is None
    assert issue.rejected
    assert "UTF-8" in issue.reason


@pytest.mark.parametrize("newline", ["\r\n", "\r"])
def test_other_newlines_give_the_chunks_of_lf(newline: str) -> None:
    text = "---\ntitle: T\n---\n# A\n\n- one\n- two\n\n```sh\nls\n```\n\n## B\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    first, _ = read(text.encode())
    second, _ = read(text.replace("\n", newline).encode())
    assert first.digest != second.digest
    assert chunks_of(first) == chunks_of(second)
    assert len(chunks_of(first)) == 2


def test_title_falls_back() -> None:
    assert read(b"---\ntitle: Front\n---\n# One\n")[0].title == "Front"
    assert read(b"## Two\n\n# *One* `x` {#id}\n")[0].title == "One x"
    assert read(b"### Three\n\n## Two\n")[0].title == "Three"
    assert read(b"text\n")[0].title == "a"
    assert read(b"# " + b"x" * 300)[0].title == "x" * 200


def test_category_falls_back() -> None:
    def category(source: str, text: str = "x") -> str:
        parsed, _ = parse_document(source, text.encode())
        assert parsed is not None
        return parsed.category

    assert category("db/mysql/a.md") == "db"
    assert category("a.md") == ""
    assert category("db/a.md", "---\ncategories: [Net, Web]\n---\n") == "Net"


def test_a_category_never_exceeds_what_the_collection_takes() -> None:
    from rag_pipeline.index.milvus import CATEGORY_BYTES
    from rag_pipeline.ingest.front_matter import MAX_CATEGORY_BYTES

    assert MAX_CATEGORY_BYTES == CATEGORY_BYTES
    folder = "磁" * 255
    parsed, (issue,) = parse_document(f"{folder}/a.md", b"x")
    assert parsed is not None
    assert parsed.category == "磁" * 170
    assert (issue.source, issue.line, issue.rejected) == (f"{folder}/a.md", 0, False)
    assert "front matter" in issue.reason
    parsed, (issue,) = parse_document("a.md", f"---\nowner: sre\ncategory: a{'磁' * 199}\n---\n".encode())
    assert parsed is not None
    assert (parsed.category, issue.line, issue.rejected) == ("a" + "磁" * 170, 3, False)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("节点磁盘写满了 disk full", "zh"),
        ("The node's disk is full, see 磁盘", "en"),
        (
            "<!--\nan English comment that nobody sees\n-->\n磁盘写满了\n\n```\nkubectl get pods -A -o wide\n```\n",
            "zh",
        ),
        ("---\nlanguage: fr\n---\nLe disque", "fr"),
        ("", "en"),
    ],
)
def test_language(text: str, language: str) -> None:
    assert read(text.encode())[0].language == language
