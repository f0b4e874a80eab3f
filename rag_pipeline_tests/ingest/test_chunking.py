"""What chunks look like: exact contents of cut tables, fences and lists, ids, spans and limits."""

import time

import pytest

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.ingest.chunking import chunk_document
from rag_pipeline.records import ChunkBudget
from rag_pipeline_tests.ingest.counting import OddCounter, WordCounter, check_invariants, chunks_of, document


def contents(text: str, *, soft: int = 300, hard: int = 480) -> list[str]:
    parsed = document(text)
    chunks = chunks_of(parsed, soft=soft, hard=hard)
    check_invariants(parsed, chunks, tokens=WordCounter(), hard=hard)
    return [chunk.content for chunk in chunks]


def test_a_chunk_carries_its_place() -> None:
    text = "---\ntitle: Disk\ntags: [etcd]\n---\nintro\n\n# A\n\n## B `x` {#b}\n\nbody\n\n"
    first, second = chunks_of(text)
    assert (first.breadcrumb, first.content, first.line_start, first.line_end) == ((), "intro", 5, 5)
    assert (second.breadcrumb, second.breadcrumb_text) == (("A", "B x"), "A > B x")
    assert second.content == "# A\n\n## B `x`\n\nbody"
    assert second.embedding_text == "Disk\nA > B x\n# A\n\n## B `x`\n\nbody"
    assert text[second.char_start : second.char_end] == "# A\n\n## B `x` {#b}\n\nbody"
    assert (second.line_start, second.line_end, second.title) == (7, 11, "Disk")
    assert (second.keywords, second.language, second.category) == (("etcd",), "en", "folder")
    assert (second.prev_id, first.next_id) == (first.id, second.id)
    assert (first.prev_id, second.next_id) == ("", "")


@pytest.mark.parametrize(
    "text", ["", "\n\n \t\n", "<!-- a -->\n\n<!-- b -->", "---\na: b\n---\n", "[a]: /b\n", "---\n***\n"]
)
def test_nothing_visible_gives_no_chunk(text: str) -> None:
    assert chunks_of(text) == []


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("**a** *b* __c__ ~~d~~ `*e*` x_y_z", "a b c d `*e*` x_y_z"),
        ("[text](http://u 'title') ![alt](i.png) <http://u> [r][1] [1]\n\n[1]: /x", "text alt http://u r 1"),
        ("[![Build](b.svg)](http://ci) [![Docs](d.svg)](http://docs)", "Build Docs"),
        (r"a \* b \<c\> \d &lt;e&gt; &nbsp;&copy;", r"a * b <c> \d <e>  ©"),
        ("<namespace> <Resolved Ts> <NODE_NAME> <EOF > a < b", "<namespace> <Resolved Ts> <NODE_NAME> <EOF > a < b"),
        ('<Tabs x="y">in</Tabs> <Icon name="z" /> <b>bold</b> a<br>b <!-- c -->d', "in  bold a b d"),
        ("{{< note >}}\ntext {{< term text=\"word\" id=\"w\" >}}\n{{% /note %}}", "text word"),
        ("`{{< n >}}` {{</* n */>}} {{ .Values }} {% raw %}", "`{{< n >}}` {{< n >}} {{ .Values }} {% raw %}"),
        ("<div>\n  <p>one <b>two</b></p>\n  <script>no()</script>\n  <p>three</p>\n</div>", "one two\nthree"),
        ("<table><tr><td>a</td><td>b</td></tr></table>", "a b"),
        ("a\n\n---\n\nb", "a\n\nb"),
        ("    code\n      more\n", "    code\n      more"),
        ("```\n<b> **x** {{< y >}}\n\n\n\n[a](b)\n```", "```\n<b> **x** {{< y >}}\n\n\n\n[a](b)\n```"),
        ("> **q**\n> [a](b\n> 'c')", "> q\n> a"),
        ("| *a* | b |\n|:------|------:|\n| x \\| **y** | `z` |", "| a | b |\n|---|---|\n| x \\| y | `z` |"),
        ("[^1]: note\n[^2]: http://u", "[^1]: note\n[^2]: http://u"),
    ],
)  # fmt: skip
def test_content_is_what_a_reader_sees(source: str, content: str) -> None:
    assert contents(source) == [content]


def test_headings_are_those_at_document_level() -> None:
    text = (
        "# A ##\n\n> # quote\n\n- # item\n\n```\n# code\n```\n\nB\n---\n\n<!--\n# no\n-->\n\n"
        "## C#\n\n#hash\n\n### D\n\nx\n\n## C#\n\ny\n"
    )
    found = [chunk.breadcrumb_text for chunk in chunks_of(text)]
    assert found == ["A", "A > B", "A > C#", "A > C# > D", "A > C#"]


def test_a_table_is_cut_between_rows_with_its_header() -> None:
    rows = "".join(f"| alert{n} | disk **full** {n} |\n" for n in range(6))
    assert contents(f"# T\n\nIntro.\n\n| name | what |\n|------|------|\n{rows}", soft=50, hard=60) == [
        "# T\n\nIntro.\n\n| name | what |\n|---|---|\n" + "\n".join(f"| alert{n} | disk full {n} |" for n in range(4)),
        "| name | what |\n|---|---|\n| alert4 | disk full 4 |\n| alert5 | disk full 5 |",
    ]


def test_a_fence_is_cut_at_line_ends_and_fenced_again() -> None:
    code = "".join(f"  kubectl get {n}\n" for n in range(9))
    assert contents(f"- run:\n\n  ~~~sh title\n{code}  ~~~\n", soft=34, hard=44) == [
        "- run:\n\n  ~~~sh title\n" + "".join(f"  kubectl get {n}\n" for n in range(5)) + "  ~~~",
        "- run:\n\n  ~~~sh title\n" + "".join(f"  kubectl get {n}\n" for n in range(5, 9)) + "  ~~~",
    ]


def test_a_list_is_cut_between_items_with_its_lead_in() -> None:
    steps = "\n".join(f"{n}. do the step number {n} now" for n in range(1, 7))
    assert contents(f"# T\n\nTo mend **it**:\n\n{steps}\n", soft=36, hard=40) == [
        "# T\n\nTo mend it:\n\n" + "\n".join(f"{n}. do the step number {n} now" for n in range(1, 4)),
        "To mend it:\n\n" + "\n".join(f"{n}. do the step number {n} now" for n in range(4, 7)),
    ]


def test_a_step_stays_with_its_code() -> None:
    text = "1. First step.\n\n```\nls one\n```\n\n2. Second step.\n\n```\nls two\n```\n"
    assert contents(text, soft=10, hard=30) == [
        "1. First step.\n\n```\nls one\n```",
        "2. Second step.\n\n```\nls two\n```",
    ]


def test_a_paragraph_is_cut_at_sentences_then_words_then_characters() -> None:
    text = "磁盘写满了。清理镜像！重启节点？好了；完"
    assert contents(text, soft=6, hard=16) == ["磁盘写满了。", "清理镜像！", "重启节点？", "好了；", "完"]
    assert contents(text, soft=12, hard=18) == ["磁盘写满了。清理镜像！", "重启节点？好了；完"]
    words = contents(" ".join(["word"] * 30), soft=12, hard=16)
    assert {word for part in words for word in part.split()} == {"word"}
    letters = contents("e\u0301" * 300, soft=12, hard=16)
    assert len(letters) > 10
    assert not any(part.startswith("\u0301") for part in letters)


def test_blocks_are_whole_while_they_fit() -> None:
    fence = "```\n" + "a b c d e\n" * 5 + "```"
    assert contents(f"one two three four five six\n\n{fence}\n\nseven\n", soft=20, hard=40) == [
        "one two three four five six",
        f"{fence}\n\nseven",
    ]


def test_a_heading_without_body_joins_the_section_below() -> None:
    chunks = chunks_of("# A\n\n<!-- x -->\n\n## B\n\nb\n\n## C\n\n## D\n\nd\n")
    assert [(chunk.breadcrumb_text, chunk.content) for chunk in chunks] == [
        ("A > B", "# A\n\n## B\n\nb"),
        ("A > C", "## C"),
        ("A > D", "## D\n\nd"),
    ]


def test_an_edit_leaves_the_ids_of_other_sections_alone() -> None:
    def ids(text: str) -> dict[str, str]:
        return {chunk.content: chunk.id for chunk in chunks_of(document(text, title="t"), soft=20, hard=40)}

    sections = ["# A\n\nfirst\n", "## B\n\nsecond\n", "## B\n\nthird\n", "# C\n\nlast\n"]
    before = ids("\n".join(sections))
    longer = ids("\n".join([sections[0], "## B\n\n" + "second. " * 40, *sections[2:]]))
    assert len(longer) > len(before)
    for content in ("# A\n\nfirst", "## B\n\nthird", "# C\n\nlast"):
        assert longer[content] == before[content]
    shifted = ids("new first lines\n\n" + "\n".join(sections))
    assert before.items() <= shifted.items()


def test_chunks_of_one_section_share_its_id() -> None:
    chunks = chunks_of("# A\n\n" + "Some words here. " * 60 + "\n\n# A\n\nx\n", soft=40, hard=60)
    sections = [chunk.section_id for chunk in chunks]
    assert len(set(sections)) == 2
    assert sections[:-1] == [sections[0]] * (len(chunks) - 1)
    assert all(len(chunk.id) == len(chunk.section_id) == 32 for chunk in chunks)


def test_long_title_and_headings_are_cut_for_the_model() -> None:
    text = "".join(f"{'#' * level} {f'level{level} ' * 100}\n\nx\n\n" for level in range(1, 7))
    parsed = document(text, title="word " * 2000)
    chunks = chunks_of(parsed, soft=60, hard=90)
    check_invariants(parsed, chunks, tokens=WordCounter(), hard=90)
    assert len(chunks[-1].breadcrumb) == 6
    head = chunks[-1].embedding_text.split("\n")[:2]
    assert head == [" ".join(["word"] * 15), " ".join(["level6"] * 15)]


def test_limits_hold_for_counts_that_do_not_add() -> None:
    parsed = document("# T\n\n" + "lorem ipsum, dolor. " * 200 + "x" * 5000 + " " * 40_000 + "y\n\n" + "文" * 20_000)
    chunks = chunks_of(parsed, soft=40, hard=50, tokens=OddCounter())
    check_invariants(parsed, chunks, tokens=OddCounter(), hard=50)


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="over the 512"):
        chunks_of("x", hard=513)
    with pytest.raises(ConfigurationError, match="no room"):
        chunks_of("x", soft=5, hard=5)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("headings", "".join(f"## H {n}\n\ntext {n}\n\n" for n in range(20_000))),
        ("quotes", "# T\n\n" + ">" * 10_000 + " deep\n\n" + "".join(">" * n + f" {n}\n" for n in range(1, 400))),
        ("lists", "".join("  " * n + f"- item {n}\n" for n in range(400))),
        ("brackets", "# T\n\n" + "[" * 50_000 + "\n"),
        ("shortcodes", "# T\n\n" + "{{< " * 50_000),
        ("comments", "# T\n\n<div>\n" + "<!-- " * 50_000),
        ("references", "# T\n\n" + "&amp;" * 50_000),
        ("spaces", "# T\n\na" + " " * 300_000 + "b"),
    ],
    ids=lambda value: value if len(value) < 20 else "",
)
def test_bombs_take_linear_time(name: str, text: str) -> None:
    parsed = document(text)
    started = time.process_time()
    chunks = chunk_document(parsed, tokens=WordCounter(), budget=ChunkBudget())
    assert time.process_time() - started < 20
    assert chunks
    assert max(chunk.token_count for chunk in chunks) <= 480
