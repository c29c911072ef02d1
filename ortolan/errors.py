"""Every error that Ortolan raises on purpose.

    OrtolanError
     ├── UsageError              a command or call was put together wrongly (exit status 2)
     ├── RequestError            a request asks for something invalid (also a ValueError)
     ├── MissingDependencyError  an optional package is not installed
     ├── CheckpointError         a checkpoint cannot be read
     │    └── ConfigError        a checkpoint describes a model that we cannot express exactly
     ├── BundleError             a bundle is incomplete, damaged, or of another version
     │    └── AccuracyError      a bundle loses more than its preset promises
     ├── ProviderError           an execution provider is unknown or unusable here
     ├── TemplateError           a chat template failed or refused the messages
     ├── EngineError             running the model failed
     ├── OverloadedError         too much is waiting already; try again later
     │    └── RateLimitError     a key has had its requests or tokens of the minute
     ├── AuthenticationError     a server wants a key, and this is none of its
     ├── CancelledError          a request was cancelled before its end
     ├── TimedOutError           a request's time was over before its end
     └── BenchError              something cannot be measured here

A message is one sentence that says what was found, where, what was expected, and what to do.
"""

from __future__ import annotations


class OrtolanError(Exception):
    """Base of all errors that a caller may want to catch and show as they are."""

    exit_status = 1


class UsageError(OrtolanError):
    """Options or arguments that do not go together."""

    exit_status = 2


class RequestError(OrtolanError, ValueError):
    """A prompt or sampling setting that cannot be served; names the field."""


class MissingDependencyError(OrtolanError):
    """An optional package is needed and absent; the message names the extra to install."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed; "
            f"run in Ortolan's clone: pip install '.[{extra}]'"
        )
        self.package = package
        self.extra = extra


class CheckpointError(OrtolanError):
    """A source file is missing, truncated, or contradicts itself."""


class ConfigError(CheckpointError):
    """The checkpoint's model has a setting that the graphs cannot express exactly."""


class BundleError(OrtolanError):
    """A bundle's folder cannot be opened, written or trusted."""


class AccuracyError(BundleError):
    """A bundle was made, and measured to lose more than was promised."""


class ProviderError(OrtolanError):
    """The execution provider is unknown, not installed, or cannot hold this bundle."""


class TemplateError(OrtolanError):
    """The chat template raised, ran past its limits, or does not exist."""


class EngineError(OrtolanError):
    """The sessions could not be built or a step failed."""


class OverloadedError(OrtolanError):
    """The queue is full. `retry_after_s` is a guess at when to try again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimitError(OverloadedError):
    """A key's limit is used up. `retry_after_s` is when there will be room again."""


class AuthenticationError(OrtolanError):
    """No key was given where one is needed, or one that is not known."""


class CancelledError(OrtolanError):
    """Somebody cancelled the request, or the engine was closed."""


class TimedOutError(OrtolanError):
    """The request's deadline passed."""


class BenchError(OrtolanError):
    """A measurement failed, or something to compare with cannot be used here."""
