"""Which module may import which, and what stays out of an import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from rag_pipeline_tests.conftest import PROJECT

PACKAGE = PROJECT / "rag_pipeline"

# A module may import from its own layer and from those before it.
LAYERS = (
    {"errors"},
    {"linear_patterns", "records", "printable"},
    {"setting_groups"},
    {"settings"},
    {"tables", "visibility", "plots", "watch"},
    {"ingest"},
    {"index"},
    {"workspace"},
    {"invocations"},
    {"retrieval"},
    {"lookup_knowledge"},
    {"tool_declarations"},
    {"examples"},
    {"verdicts"},
    {"contracts"},
    {"steps"},
    {"release"},
    {"reindex"},
    {"console", "local_stack"},
    {"commands"},
    {"cli"},
    {"defs"},
    {"definitions"},
)
HEAVY = {
    "alembic", "dagster", "great_expectations", "langchain_core", "langchain_milvus", "matplotlib", "pymilvus", "re2",
    "sentence_transformers", "sqlalchemy", "torch", "transformers",
}  # fmt: skip
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_layers(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module == "rag_pipeline":
            names = [f"rag_pipeline.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name and name.startswith("rag_pipeline.")}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_upward_only(path: Path) -> None:
    downward = {name for name in imported_layers(path) if RANK[name] > RANK[layer_of(path)]}
    assert downward == set()


def test_the_package_itself_imports_nothing() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    assert [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)] == []


@pytest.mark.parametrize(
    "module",
    [
        "rag_pipeline.settings",
        "rag_pipeline.ingest.chunking",
        "rag_pipeline.index.models",
        "rag_pipeline.index.milvus",
        "rag_pipeline.reindex",
        "rag_pipeline.retrieval.sdk_search",
        "rag_pipeline.lookup_knowledge",
        "rag_pipeline.tool_declarations",
        "rag_pipeline.retrieval.langchain_search",
        "rag_pipeline.invocations.recorder",
        "rag_pipeline.contracts",
        "rag_pipeline.cli",
    ],
)
def test_no_pure_module_pulls_in_dagster_or_a_heavy_library(module: str) -> None:
    script = f"import sys, {module}; print(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_nothing_that_is_made_is_tracked() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", ".venv", ".rag"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    assert tracked.stdout == ""


def test_the_python_example_of_the_readme_names_what_exists() -> None:
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    example = readme.split("```python\n")[1].split("```")[0]
    imports = "\n".join(line for line in example.splitlines() if line.startswith("from "))
    ast.parse(example)
    exec(imports, {})
