"""Find the Markdown files below the roots and read each into a `Document`, or into an `Issue` that says why not."""

import hashlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.ingest.decoding import decode
from rag_pipeline.ingest.front_matter import (
    MAX_CATEGORY_BYTES,
    MAX_VALUE_CHARACTERS,
    cut_to_bytes,
    read_front_matter,
)
from rag_pipeline.ingest.markdown_blocks import parse_blocks
from rag_pipeline.records import Document, Issue, SourceFile

MARKDOWN_SUFFIXES = (".md", ".markdown")
DEFAULT_MAX_BYTES = 8 * 2**20

_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_LATIN_WORD = re.compile("[A-Za-z\u00c0-\u024f]{2,}")


@dataclass(frozen=True, slots=True)
class Root:
    """A folder of Markdown files.

    Attributes:
        name: Prefix of ``source`` when there are several roots.
        path: The folder.
    """

    name: str
    path: Path


def discover(roots: Sequence[Root], *, max_bytes: int = DEFAULT_MAX_BYTES) -> tuple[list[SourceFile], list[Issue]]:
    """Find ``**/*.md`` and ``**/*.markdown`` (any case) below the roots.

    Hidden files and folders are skipped; a hidden Markdown file and a hidden folder other than ``.git`` give a
    warning. A link is followed while it stays inside its root; a folder that is reached twice counts once, by its real
    place. Rejected: links that leave the root or lead nowhere (whatever their name: one may have been a folder of
    documents), files over ``max_bytes``, whatever is no regular file, names that are not Unicode, and files and
    folders that cannot be read.

    Returns:
        The files sorted by ``source``, and the issues sorted by source. A folder's source has no slash at its end; an
        issue on it covers every document below it. A root that cannot be read has the source ``""``, which covers
        everything, or its name when there are several roots.

    Raises:
        ConfigurationError: A root is missing, no folder, or cannot be looked at; or two roots have the same name.
    """
    names = [root.name for root in roots]
    for name in names:
        if len(roots) > 1 and (not name or "/" in name or names.count(name) > 1):
            raise ConfigurationError(
                f"The knowledge root name {name!r} is blank, holds a slash or is given twice; "
                "give every root in [[knowledge.roots]] a name of its own."
            )
    files: list[SourceFile] = []
    issues: list[Issue] = []
    for root in roots:
        if fault := _fault(root.path):
            raise ConfigurationError(f"The knowledge root {str(root.path)!r} {fault}; create it or name another one.")
        walk = _Walk(root, prefix=f"{root.name}/" if len(roots) > 1 else "", max_bytes=max_bytes)
        walk.run()
        files += walk.files
        issues += walk.issues
    return sorted(files, key=lambda file: file.source), sorted(issues, key=lambda issue: issue.source)


def _fault(path: Path) -> str:
    """Why a root cannot be walked, blank when it can."""
    try:
        return "" if stat.S_ISDIR(path.stat().st_mode) else "is not a folder"
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be looked at ({_why(error)})"
    except ValueError as error:  # a NUL in the name
        return f"cannot be looked at ({error})"


class _Walk:
    """One pass over one root; real folders first, then the linked ones that were not met yet."""

    def __init__(self, root: Root, *, prefix: str, max_bytes: int) -> None:
        self.files: list[SourceFile] = []
        self.issues: list[Issue] = []
        self._real_root = root.path.resolve()
        self._root_name = root.name if prefix else ""
        self._prefix = prefix
        self._max_bytes = max_bytes

    def run(self) -> None:
        """Fill ``files`` and ``issues``."""
        visited: set[Path] = set()
        pending: list[tuple[Path, str]] = [(self._real_root, "")]
        linked: list[tuple[Path, str]] = []
        while pending or linked:
            folder, relative = pending.pop() if pending else linked.pop(0)
            real = folder.resolve()
            if real in visited:
                continue
            visited.add(real)
            for entry in self._entries(folder, relative):
                place = f"{relative}{entry.name}"
                try:
                    self._visit(entry, place, pending, linked)
                except OSError as error:
                    self._report(place, f"It could not be read ({_why(error)}); check its permissions and the disk.")

    def _entries(self, folder: Path, relative: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            reason = f"The folder could not be read ({_why(error)}); check its permissions and the disk."
            self._report(relative, reason)
            return []

    def _visit(
        self,
        entry: os.DirEntry[str],
        place: str,
        pending: list[tuple[Path, str]],
        linked: list[tuple[Path, str]],
    ) -> None:
        is_markdown = entry.name.lower().endswith(MARKDOWN_SUFFIXES)
        is_link = entry.is_symlink()
        leads_nowhere = is_link and not Path(entry.path).exists()
        is_folder = not leads_nowhere and entry.is_dir()
        if entry.name.startswith("."):
            if is_folder and entry.name != ".git":
                self._report(place, "A hidden folder is skipped; rename it if it should be searched.", rejected=False)
            elif is_markdown:
                self._report(place, "A hidden file is skipped; rename it if it should be searched.", rejected=False)
            return
        if leads_nowhere:
            self._report(place, "The link leads nowhere; mend it, or remove it when what it named is gone for good.")
            return
        if not is_folder and not is_markdown:
            return
        if is_link and not self._is_inside(Path(entry.path)):
            self._report(place, "The link leaves its root; copy what it leads to into the root instead.")
        elif is_folder:
            (linked if is_link else pending).append((Path(entry.path), f"{place}/"))
        else:
            self._add(entry, place)

    def _is_inside(self, path: Path) -> bool:
        try:
            return path.resolve(strict=True).is_relative_to(self._real_root)
        except (OSError, RuntimeError):  # RuntimeError: links in a circle
            return False

    def _add(self, entry: os.DirEntry[str], place: str) -> None:
        status = entry.stat()
        if not stat.S_ISREG(status.st_mode):
            self._report(place, "It is not a regular file; only files can be documents.")
        elif status.st_size > self._max_bytes:
            self._report(place, f"It has {status.st_size} bytes, over the limit of {self._max_bytes}; split the file.")
        elif _printable(place) != place:
            self._report(place, "The file name is not valid Unicode; rename the file.")
        else:
            raw = Path(entry.path).read_bytes()
            digest = hashlib.sha256(raw).hexdigest()
            source = self._prefix + place
            self.files.append(
                SourceFile(source=source, path=entry.path, digest=digest, size=len(raw), root=self._root_name)
            )

    def _report(self, place: str, reason: str, *, rejected: bool = True) -> None:
        source = _printable(self._prefix + place).removesuffix("/")
        self.issues.append(Issue(source=source, line=0, reason=reason, rejected=rejected))


def read_document(file: SourceFile) -> tuple[Document | None, list[Issue]]:
    """Read a file that `discover` found.

    Returns:
        The document and its warnings, or None and one rejecting issue. Never raises for what the file holds.
    """
    try:
        raw = Path(file.path).read_bytes()
    except OSError as error:
        reason = f"The file could not be read ({_why(error)}); check its permissions and the disk."
        return None, [Issue(source=file.source, line=0, reason=reason, rejected=True)]
    return parse_document(file.source, raw, root=file.root)


def parse_document(source: str, raw: bytes, *, root: str = "") -> tuple[Document | None, list[Issue]]:
    """Decode a document and read its front matter, title and language.

    Args:
        source: Identity of the document, see `SourceFile`.
        raw: The file's bytes.
        root: Name of the root when ``source`` begins with it; it is no category.

    Returns:
        The document and its warnings, or None and one rejecting issue.
    """
    decoded = decode(raw)
    if isinstance(decoded, str):
        return None, [Issue(source=source, line=0, reason=decoded, rejected=True)]
    issues = []
    if decoded.warning:
        issues.append(Issue(source=source, line=decoded.line, reason=decoded.warning, rejected=False))
    matter = read_front_matter(decoded.text)
    if matter.fault:
        issues.append(Issue(source=source, line=matter.fault_line, reason=matter.fault, rejected=False))
    issues += [Issue(source=source, line=line, reason=reason, rejected=False) for line, reason in matter.cuts]
    relative = source.removeprefix(f"{root}/") if root else source
    title, language = matter.title, matter.language
    if not title or not language:
        blocks = parse_blocks(decoded.text[matter.body_start :])
        title = title or _title(blocks.headings, relative)
        language = language or _language(blocks.visible_text)
    category = matter.category
    if not category:
        folder = relative.rpartition("/")[0].partition("/")[0]
        category = cut_to_bytes(folder, MAX_CATEGORY_BYTES)
        if category != folder:
            reason = (
                f"The folder name is over {MAX_CATEGORY_BYTES} bytes and was cut to be the category; shorten it, or "
                "write `category` into the front matter."
            )
            issues.append(Issue(source=source, line=0, reason=reason, rejected=False))
    document = Document(
        source=source,
        digest=hashlib.sha256(raw).hexdigest(),
        text=decoded.text,
        body_start=matter.body_start,
        title=title,
        category=category,
        keywords=matter.keywords,
        alerts=matter.alerts,
        service=matter.service,
        severity=matter.severity,
        owner=matter.owner,
        language=language,
        updated=matter.updated,
        encoding=decoded.encoding,
    )
    return document, issues


def _title(headings: Sequence[tuple[int, str]], relative: str) -> str:
    """First H1, else the first heading, else the file name without its ending."""
    texts = [text for level, text in headings if level == 1 and text] or [text for _, text in headings if text]
    title = texts[0] if texts else PurePosixPath(relative).stem
    return title[:MAX_VALUE_CHARACTERS].rstrip()


def _language(visible: str) -> str:
    """``zh`` when there are more Han characters than Latin words of two letters or more, else ``en``."""
    return "zh" if len(_HAN.findall(visible)) > len(_LATIN_WORD.findall(visible)) else "en"


def _printable(text: str) -> str:
    return os.fsencode(text).decode("utf-8", errors="backslashreplace")


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__
