"""Every nasty file: no word is lost, no limit exceeded, the headings are CommonMark's, and its own "must" holds."""

import csv
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rag_pipeline.ingest.documents import parse_document
from rag_pipeline.ingest.markdown_blocks import parse_blocks
from rag_pipeline.records import Chunk, Document, Issue
from rag_pipeline_tests.ingest.counting import WordCounter, check_invariants, chunks_of, document

DATA = Path(__file__).parents[3] / "shared" / "data"
FILES = sorted(path.name for path in (DATA / "nasty").glob("*")) or ["(no data)"]

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not (DATA / "nasty").is_dir(), reason="the development corpora are not beside the project"),
]

Case = tuple[Document, list[Chunk], list[Issue]]
MUST: dict[str, Callable[[Document, list[Chunk], list[Issue]], None]] = {}


def must(*names: str) -> Callable[..., Callable[..., None]]:
    def add(check: Callable[[Document, list[Chunk], list[Issue]], None]) -> Callable[..., None]:
        MUST.update(dict.fromkeys(names, check))
        return check

    return add


def contents(chunks: list[Chunk]) -> str:
    return "\n\n".join(chunk.content for chunk in chunks)


def paths(chunks: list[Chunk]) -> list[str]:
    return list(dict.fromkeys(chunk.breadcrumb_text for chunk in chunks))


@must("r_only_front_matter.md", "r_fm_end_at_eof.md")
def only_front_matter(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert (parsed.body_start, chunks, issues) == (len(parsed.text), [], [])


@must("r_bom_front_matter_en.md")
def bom(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert (parsed.title, parsed.encoding, parsed.text[:4], issues) == ("SQL Mode", "utf-8-sig", "---\n", [])
    assert chunks[0].line_start == 7
    assert parsed.text[chunks[0].char_start :].startswith("# SQL Mode\n")


@must("r_crlf_front_matter.md", "r_crlf_zh_shortcode.md")
def crlf(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert "\r" not in parsed.text
    assert [chunk.content_digest for chunk in chunks] == [
        chunk.content_digest for chunk in chunks_of(document(parsed.text))
    ]
    assert len(chunks) == 1
    assert not issues


@must("r_fence_closed_deeper_in_list.md")
def fence_in_list(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    root = "SingleStackIPv6Unsupported [Deprecated]"
    assert paths(chunks) == [root, *(f"{root} > {name}" for name in ("Meaning", "Impact", "Diagnosis", "Mitigation"))]
    assert "networks" not in chunks[3].content
    assert "oc get network.config" not in contents(chunks)
    assert "USstart" not in contents(chunks)


@must("r_nested_fence_lists.md")
def nested_fences(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    for chunk in chunks:
        assert len(re.findall(r"^[ >]*```", chunk.content, re.MULTILINE)) % 2 == 0, chunk.content
    assert "{{<" not in contents(chunks)
    steps = [chunk for chunk in chunks if "kubectl set image deployment/nginx-deployment nginx" in chunk.content]
    assert any(re.search(r"^1\. ", chunk.content, re.MULTILINE) for chunk in steps)


@must("r_headings_in_html_comments_zh.md")
def headings_in_comments(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert parsed.language == "zh"
    assert "{#" not in "".join(paths(chunks))
    assert "Introduction" not in paths(chunks)
    assert paths(chunks)[1:3] == ["介绍", "卷和申领的生命周期"]


@must("r_huge_table_pipes_in_code.md", "r_huge_table_metrics.md")
def huge_table(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    headers = {"| Feature | Default | Stage | Since | Until |", "| Operator Name | Name | Kind | Type | Description |"}
    parts = [chunk for chunk in chunks if re.match(r"\|", chunk.content)]
    assert len(parts) > 30
    for chunk in parts:
        header, delimiter, *rows = chunk.content.splitlines()
        assert header in headers
        assert delimiter == "|---|---|---|---|---|"
        assert rows
    for chunk in chunks:
        for row in re.findall(r"^\|.*", chunk.content, re.MULTILINE):
            assert row.endswith("|"), row


@must("r_html_tables.md", "r_long_html_lines.md", "r_html_table_pss.md")
def html(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    text = re.sub(r"```.*?```", "", contents(chunks), flags=re.DOTALL)
    assert not re.search(r"</?(?:table|td|tr|div|details|summary|tt|code|li|ul|col|colgroup|p)\b[^>]*>", text)
    samples = {
        "r_html_tables.md": "ProxySQL",
        "r_long_html_lines.md": "--bind-address-hard-fail",
        "r_html_table_pss.md": "spec.securityContext.windowsOptions.hostProcess",
    }
    assert any(value in text for value in samples.values())


@must("r_deep_list_indent.md")
def code_keeps_indentation(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    lines = [line for line in parsed.text.splitlines() if line.startswith(" " * 20) and "- " in line]
    assert lines
    assert all(line.rstrip() in contents(chunks) for line in lines)


@must("r_shortcodes_in_code.md")
def shortcodes_in_code(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert "{{</* note */>}}" in contents(chunks)
    outside = re.sub(r"^( *)(`{3,}|~{3,}).*?^ *\2", "", contents(chunks), flags=re.DOTALL | re.MULTILINE)
    assert "{{< note >}}" not in re.sub(r"`[^`]*`", "", outside)
    assert "Documentation formatting standards" not in "".join(paths(chunks))


@must("r_mdx_tags.md")
def mdx(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    for placeholder in ("<Column Name>", "<Where Handle>", "<TS>", "<Schema Name>"):
        assert parsed.text.count(placeholder) <= contents(chunks).count(placeholder) > 0


@must("r_footnotes_table.md")
def footnotes(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert parsed.language == "zh"
    assert "[^1]: TiDB 误将 latin1 处理为 utf8 的子集。" in contents(chunks)
    assert len(re.findall(r"^\[\^\d+\]:", contents(chunks), re.MULTILINE)) == len(
        re.findall(r"^\[\^\d+\]:", parsed.text, re.MULTILINE)
    )


@must("r_nbsp.md")
def nbsp(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert paths(chunks)[0] == ""
    assert "easyrsa" in paths(chunks)


@must("r_no_heading_long.md")
def no_heading(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert parsed.title == "r_no_heading_long"
    assert paths(chunks) == [""]
    assert all(re.search(r"""[.!?:;,"”)—\w]$""", chunk.content) for chunk in chunks)
    breaks = sum(parsed.text[chunk.char_end : chunk.char_end + 2] == "\n\n" for chunk in chunks[:-1])
    assert breaks >= 0.9 * (len(chunks) - 1)


@must("r_cjk_long_runs.md")
def cjk_runs(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    small = chunks_of(parsed, soft=100, hard=160)
    ends = [chunk.content[-1] for chunk in small]
    assert sum(end in "。；！？：，、`*|)" for end in ends) > 0.8 * len(ends)


@must("r_heading_code_and_links.md")
def heading_code(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert "`" not in "".join(paths(chunks))
    assert any("1.1 客户端报 Region is Unavailable 错误" in path for path in paths(chunks))
    assert "<!--" not in contents(chunks)


@must("r_ref_links.md")
def reference_links(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert "kubernetes/pull/" not in contents(chunks)
    assert "(#6098)" in contents(chunks)
    assert chunks[-1].line_end == parsed.text.rstrip().count("\n") + 1


@must("r_list_steps_with_code.md")
def steps(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    tight = chunks_of(parsed, soft=60, hard=120)
    step = next(chunk for chunk in tight if "get dataimportcron <dataimportcron>" in chunk.content)
    assert "3. If a default storage class is not defined on the cluster" in step.content


@must("r_empty_file.md", "g_only_comment.md")
def nothing(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert (chunks, issues) == ([], [])


@must("g_nul_bytes.md")
def nul(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert "\x00" not in parsed.text
    assert "before\ufffdafter and more text \ufffd\ufffd end." in contents(chunks)


@must("g_invalid_utf8_one_byte.md")
def latin(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert "latency is high, see" in contents(chunks)
    assert [(issue.line, issue.rejected) for issue in issues] == [(3, False)]


@must("g_truncated_utf8.md")
def truncated(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert contents(chunks) == "# 标题\n\n正文内\ufffd"
    assert [(issue.line, issue.rejected) for issue in issues] == [(3, False)]


@must("g_toml_front_matter.md")
def toml(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert (parsed.title, parsed.keywords) == ("TOML front matter", ("etcd", "disk"))
    assert "+++" not in contents(chunks)


@must("g_yaml_fm_malformed.md")
def malformed(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert contents(chunks) == "# Disk full\n\nClean the logs."
    assert [(issue.source, issue.line, issue.rejected) for issue in issues] == [("g_yaml_fm_malformed.md", 2, False)]


@must("g_yaml_fm_bomb.md")
def bomb(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert (parsed.keywords, contents(chunks)) == ((), "# T\n\nBody.")


@must("g_fm_not_first.md")
def not_first(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert (parsed.body_start, parsed.title) == (0, "T")
    assert paths(chunks) == ["title: not front matter", "T"]


@must("g_fm_with_dashes_inside.md")
def dashes_inside(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert (parsed.title, contents(chunks), chunks[0].line_start) == ("x", "# T\n\nBody.", 8)


@must("g_only_headings.md")
def only_headings(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert [(chunk.breadcrumb_text, chunk.content) for chunk in chunks] == [
        ("A > B > C", "# A\n\n## B\n\n### C"),
        ("A > D", "## D"),
    ]


@must("g_setext_forms.md")
def setext(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert paths(chunks) == ["Title one > Two lines of heading text"]


@must("g_html_blocks.md")
def html_blocks(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert paths(chunks) == ["T", "T > Heading in details", "yes (blank line ended the HTML block)"]
    # One of them is the text of a div; the one in the script is not indexed.
    assert re.findall("^# no$", contents(chunks), re.MULTILINE) == ["# no"]
    assert "More" in chunks[0].content


@must("g_one_line_1mb_ascii.md")
def one_line(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert len(chunks) > 300
    assert all(parsed.text[chunk.char_end : chunk.char_end + 1] in (" ", "\n", "") for chunk in chunks)


@must("g_cjk_300kb_no_punct.md")
def cjk_no_punctuation(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert len(chunks) > 200


@must("g_deep_list_200.md")
def deep_list(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert all(chunk.breadcrumb == ("T",) for chunk in chunks)


@must("g_brackets_bomb.md")
def brackets(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert paths(chunks) == ["T", "T > After"]


@must("g_backticks_bomb.md")
def backticks(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert paths(chunks) == ["T"]


@must("g_headings_5000_same.md")
def same_headings(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert len(chunks) == 5000
    assert len({chunk.section_id for chunk in chunks}) == 5000
    again = chunks_of(document(parsed.text, source=parsed.source, title=parsed.title))
    assert [chunk.id for chunk in again] == [chunk.id for chunk in chunks]


@must("g_heading_10k_chars.md")
def long_heading(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert max(len(heading) for chunk in chunks for heading in chunk.breadcrumb) <= 200
    assert len(parsed.title) <= 200


@must("g_levels_skip_back.md")
def levels(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert paths(chunks) == [
        "Starts at three",
        "Starts at three > Six",
        "One",
        "One > Three under one",
        "One > Two",
    ]


@must("g_splitlines_trap.md")
def splitlines_trap(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert paths(chunks) == ["T", "T > Real"]
    assert (chunks[0].line_end, chunks[1].line_start) == (4, 6)


@must("g_thai_no_spaces.md")
def thai(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    import unicodedata

    small = chunks_of(parsed, soft=40, hard=60)
    assert len(small) > 20
    assert not any(unicodedata.category(chunk.content[0]) in ("Mn", "Mc", "Me") for chunk in small)


@must("g_indented_code_and_lists.md")
def indented_code(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert paths(chunks) == ["T", "Real"]


@must("g_duplicate_b.md")
def duplicate(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    other = document(parsed.text, source="g_duplicate_a.md")
    assert chunks_of(other)[0].content_digest == chunks[0].content_digest
    assert chunks_of(other)[0].id != chunks[0].id


@must("g_prompt_injection.md")
def injection(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert "Ignore all previous instructions" in chunks[0].content
    assert "developer mode" not in contents(chunks)


@must("g_template_braces.md")
def braces(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert paths(chunks) == ["{{ title }}", "{{ title }} > id in [\"a\"] && service == 'x'"]
    kept = (
        "Alert {{ $labels.instance }} of {job=\"x\"} {% raw %}{{ x }}{% endraw %} %s %(a)s ${HOME} \\n \\u0000 'quote'"
    )
    assert kept in chunks[0].content


@must(*(name for name in FILES if name.startswith(("g name", "g_emoji", "g_UPPER", "g_nnn", "g_newline"))))
def odd_name(parsed: Document, chunks: list[Chunk], issues: list[Issue]) -> None:
    assert len(chunks) == 1
    assert chunks[0].source == parsed.source in FILES
    assert not issues


def expected_headings() -> dict[str, list[tuple[int, int, str]]]:
    found = {}
    for line in (DATA / "nasty_headings.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        top = [heading for heading in entry["headings"] if heading.get("depth") == 0]
        found[entry["file"]] = [(heading["line"], heading["level"], heading["text"]) for heading in top]
    return found


def plain(heading: str) -> str:
    """The visible text of a heading, as one reads it off the listed source text."""
    text = re.sub(r"\s*\{\s*#[^{}]*\}\s*$", "", heading)
    text = re.sub(r'\{\{% heading "(.*?)" %\}\}', r"\1", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(text.replace("`", "").replace("**", "").split())


@pytest.mark.parametrize("name", FILES)
def test_nasty_file(name: str) -> None:
    raw = (DATA / "nasty" / name).read_bytes()
    started = time.process_time()
    parsed, issues = parse_document(name, raw)
    assert parsed is not None
    chunks = chunks_of(parsed)
    assert time.process_time() - started < 15
    check_invariants(parsed, chunks, tokens=WordCounter(), hard=480)
    MUST[name](parsed, chunks, issues)


@pytest.mark.parametrize("name", FILES)
def test_headings_are_those_of_commonmark(name: str) -> None:
    parsed, _ = parse_document(name, (DATA / "nasty" / name).read_bytes())
    assert parsed is not None
    first_line = parsed.text.count("\n", 0, parsed.body_start) + 1
    body = parse_blocks(parsed.text[parsed.body_start :])
    lines = [block.start_line + first_line for block in body.blocks if block.kind == "heading"]
    found = [(line, level, text) for line, (level, text) in zip(lines, body.headings, strict=True)]
    # The list was made without knowledge of front matter.
    expected = [entry for entry in expected_headings()[name] if entry[0] >= first_line]
    found = found[: len(expected)] if len(expected) < len(found) == 5001 else found
    assert [entry[:2] for entry in found] == [entry[:2] for entry in expected]
    for (_, _, text), (_, _, listed) in zip(found, expected, strict=True):
        # The list holds at most 200 characters of a text.
        assert text[: len(plain(listed))] == plain(listed)
        assert len(listed) == 200 or text == plain(listed)


def test_every_file_has_its_check() -> None:
    with (DATA / "nasty.tsv").open(encoding="utf-8", newline="") as file:
        listed = {row["file"] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)}
    assert listed <= set(MUST)
    assert set(FILES) == set(MUST)
