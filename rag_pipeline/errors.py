"""Every error this project raises on purpose, with the exit code that the command line gives it.

A message is a full sentence: what was found, where, and what to do next.
"""


class RagPipelineError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what ``rag-pipeline`` ends with."""

    exit_code = 1


class CheckFailedError(RagPipelineError):
    """A check or gate found the new version worse or broken; the alias was not moved."""

    exit_code = 1


class ConfigurationError(RagPipelineError):
    """Wrong usage, or a setting that cannot be right."""

    exit_code = 2


class UnavailableError(RagPipelineError):
    """A store, model or endpoint cannot be reached or does not answer in time."""

    exit_code = 3


class ModelUnavailableError(UnavailableError):
    """An embedding model cannot be found or loaded."""


class StoreUnavailableError(UnavailableError):
    """The vector store cannot be reached, is too slow, or has no usable version."""


class RefusedError(RagPipelineError):
    """Done nothing, to protect data: a mass deletion, a lock that is held, an alias in use."""

    exit_code = 4
