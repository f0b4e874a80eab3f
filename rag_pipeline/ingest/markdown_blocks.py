"""Parse a Markdown body into a tree of blocks with true line ranges, and into the edits that make its visible text.

The structure comes from markdown-it-py (CommonMark with tables), never from patterns over lines. Two things differ from
plain CommonMark: ``[^1]: text`` is a footnote's text, not a link definition; and what lies deeper than markdown-it's 20
levels of nesting is kept as plain text of the block around it.

A block's text is its source with these edits: those of `ingest.markdown_inline` for running text and HTML blocks;
thematic breaks, link definitions, empty headings and empty fences go; ``{#anchor}`` goes from the end of a heading;
a table's delimiter row is shortened to three dashes a column; a line that the edits leave blank goes with its line end.
Code is never edited.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.token import Token

from rag_pipeline.ingest.markdown_inline import InlineEditor

_CONTAINERS = {
    "bullet_list": "list",
    "ordered_list": "list",
    "list_item": "item",
    "blockquote": "quote",
    "table": "table",
    "tr": "row",
}
_LEAVES = {"fence": "fence", "code_block": "code", "html_block": "html", "hr": "hr"}
ANCHOR = re.compile(r"[ \t]*\{[ \t]*#[^{}\n]*\}[ \t]*$")
_NOISE = re.compile(
    r"\]\([^()\s]{0,300}\)|https?://[^\s)>]{1,300}|<!--.{0,2000}?-->|<[^<>]{0,300}>|\{\{[<%].{0,300}?\}\}", re.S
)
_MAX_SAMPLE = 200_000


@dataclass(slots=True)
class Block:
    """One block; lines are 0-based in the body, ``end_line`` is exclusive.

    Attributes:
        kind: heading, paragraph, fence, code, html, hr, list, item, quote, table, row, definition, or text (what
            no other block covers).
        level: 1 to 6 for a heading, else 0.
        depth: Number of blocks around it.
        content: Source of a heading's or paragraph's text, or the text of a fence, code or HTML block.
        markup: The characters that open a fence.
        info: Info string of a fence.
    """

    kind: str
    start_line: int
    end_line: int
    level: int = 0
    depth: int = 0
    children: list["Block"] = field(default_factory=list)
    content: str = ""
    markup: str = ""
    info: str = ""


@dataclass(slots=True)
class ParsedBody:
    """A parsed Markdown body.

    Attributes:
        text: The body.
        line_starts: Code point at which each line begins, and the length of the text as last entry.
        blocks: Top-level blocks in order; together with blank lines they cover the text.
    """

    text: str
    line_starts: list[int]
    blocks: list[Block]
    tokens: list[Token]
    references: dict[str, object]

    def offset(self, line: int) -> int:
        """Code point at which the 0-based ``line`` begins; the end of the text past the last line."""
        return self.line_starts[min(line, len(self.line_starts) - 1)]

    @property
    def headings(self) -> list[tuple[int, str]]:
        """Level and visible text of the document-level headings, in order."""
        editor = InlineEditor(self.text, self.references)
        return [(block.level, heading_text(editor, block.content)) for block in self.blocks if block.kind == "heading"]

    @property
    def visible_text(self) -> str:
        """A sample of the running text without code, comments and addresses; good enough to tell the language."""
        parts = []
        size = 0
        for token in self.tokens:
            if token.type in ("inline", "html_block"):
                parts.append(token.content)
                size += len(token.content)
                if size > _MAX_SAMPLE:
                    break
        return _NOISE.sub(" ", "\n".join(parts)[: 2 * _MAX_SAMPLE])


def heading_text(editor: InlineEditor, content: str) -> str:
    """Visible text of a heading's inline content, on one line, without its ``{#anchor}``."""
    return editor.plain(ANCHOR.sub("", content))


def parse_blocks(body: str) -> ParsedBody:
    """Parse a Markdown body (newlines are LF)."""
    parser = MarkdownIt("commonmark").enable("table")
    parser.core.ruler.enableOnly(["normalize", "block"])
    parser.block.ruler.at("reference", _noting_definitions(parser), {"alt": []})
    env: dict[str, object] = {"definitions": []}
    tokens = parser.parse(body, env)
    line_starts = [0]
    line_starts += [match.end() for match in re.finditer("\n", body)]
    if line_starts[-1] != len(body):
        line_starts.append(len(body))
    references = env.get("references")
    parsed = ParsedBody(body, line_starts, [], tokens, references if isinstance(references, dict) else {})
    definitions = env["definitions"]
    parsed.blocks = _tree(parsed, tokens, definitions if isinstance(definitions, list) else [])
    return parsed


def _noting_definitions(parser: MarkdownIt) -> Callable[[StateBlock, int, int, bool], bool]:
    rule = next(rule.fn for rule in parser.block.ruler.__rules__ if rule.name == "reference")

    def noted(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:  # noqa: FBT001
        start = state.bMarks[start_line] + state.tShift[start_line]
        if state.src.startswith("[^", start) or not rule(state, start_line, end_line, silent):
            return False
        if not silent:
            state.env["definitions"].append((start_line, state.line))
        return True

    return noted


def _tree(parsed: ParsedBody, tokens: Sequence[Token], definitions: list[tuple[int, int]]) -> list[Block]:
    """Nest the blocks without recursion and fill what no block covers."""
    root = Block("root", 0, len(parsed.line_starts))
    stack = [root]
    for index, token in enumerate(tokens):
        name = token.type.removesuffix("_open").removesuffix("_close")
        if name in _CONTAINERS:
            if token.nesting < 0:
                stack.pop()
                continue
            start, end = token.map or (0, 0)
            block = Block(_CONTAINERS[name], start, end, depth=len(stack) - 1)
            stack[-1].children.append(block)
            stack.append(block)
        elif token.type in _LEAVES and token.map:
            start, end = token.map
            leaf = Block(_LEAVES[token.type], start, end, depth=len(stack) - 1)
            leaf.content, leaf.markup, leaf.info = token.content, token.markup, token.info
            stack[-1].children.append(leaf)
        elif token.type in ("paragraph_open", "heading_open") and token.map:
            level = int(token.tag[1]) if token.type == "heading_open" else 0
            content = tokens[index + 1].content
            start, end = token.map
            stack[-1].children.append(Block(name, start, end, level=level, depth=len(stack) - 1, content=content))
    _fill(parsed, root, definitions)
    return root.children


def _fill(parsed: ParsedBody, root: Block, definitions: list[tuple[int, int]]) -> None:
    """Add a block for each run of non-blank lines that no child covers: link definitions, and text nested too deep."""
    pending = [root]
    while pending:
        parent = pending.pop()
        if parent.kind == "table":
            _fill_table(parent)
            continue
        if parent is not root and not parent.children:
            continue
        filled: list[Block] = []
        line = parent.start_line
        for child in [*parent.children, Block("end", parent.end_line, parent.end_line)]:
            if child.start_line > line:
                filled += _gap(parsed, line, child.start_line, definitions)
            filled.append(child)
            line = max(line, child.end_line)
        filled.pop()
        parent.children = filled
        pending += [child for child in filled if child.children]


def _fill_table(table: Block) -> None:
    """The header row takes the delimiter row with it."""
    if table.children:
        table.children[0].end_line = min(table.children[0].start_line + 2, table.end_line)


def _gap(parsed: ParsedBody, start: int, end: int, definitions: list[tuple[int, int]]) -> Iterator[Block]:
    text = parsed.text
    first = bisect_right(definitions, (start, -1))
    line = start
    for definition_start, definition_end in definitions[first:]:
        if definition_start >= end:
            break
        if text[parsed.offset(line) : parsed.offset(definition_start)].strip():
            yield Block("text", line, definition_start)
        yield Block("definition", definition_start, min(definition_end, end))
        line = definition_end
    if text[parsed.offset(line) : parsed.offset(end)].strip():
        yield Block("text", line, end)
